"""A transport that is not to be trusted."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.wire import Pending, ProcessGroupTransport
from gradwire.wire.checked import SEAL_BYTES


class Flipping(ProcessGroupTransport):
    """Changes a bit of the payload or of the seal, or the same one of both, that rank ``sender`` sends to this rank."""

    sender = -1
    payloads = seals = True

    def _flipped(self, pending: Pending, rows: bool) -> Pending:
        def wait() -> Tensor:
            got = pending()
            line = (got[self.sender] if rows else got).view(-1).view(torch.uint8)
            if self.sender >= 0 and (self.seals if len(line) == SEAL_BYTES else self.payloads):
                line[3] ^= 16
            return got

        return wait

    def all_gather(self, payload: Tensor, straight: bool = False) -> Pending:
        return self._flipped(super().all_gather(payload, straight), rows=True)

    def all_to_all(self, payloads: Tensor) -> Pending:
        return self._flipped(super().all_to_all(payloads), rows=True)

    def exchange(self, payload: Tensor, partner: int) -> Pending:
        return self._flipped(super().exchange(payload, partner), rows=False)

    def broadcast(self, buffer: Tensor, source: int) -> Pending:
        return self._flipped(super().broadcast(buffer, source), rows=False)
