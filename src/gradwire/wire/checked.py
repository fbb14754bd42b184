"""Payloads with seals: what arrives is what was sent, or an error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire import kernels
from gradwire.deferred import expect, placed
from gradwire.errors import PayloadError
from gradwire.randomness import MASK64, key_of
from gradwire.wire.meter import Meter
from gradwire.wire.transport import Line, Pending

SEAL_BYTES = 8

SPREAD = -0x61C8864680B583EB
"""An odd number that spreads the bits of a sum: few flipped bits of a payload then change many of its seal."""


def checksums(rows: Tensor) -> Tensor:
    """64-bit checksums, ``int64[n]``, of the rows of ``uint8[n, b]``.

    The sum of all 4-byte words, each times an odd number of its own, modulo ``2**64``. Any change within one word is
    found, and any two flipped bits; changes of several words cancel by chance only. It is no protection against changes
    that somebody makes on purpose.
    """
    sums = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    kernels.checksums(_words(rows), sums)
    return sums


def checksum_of(tensor: Tensor) -> Tensor:
    """The checksum of all bits of a tensor, ``int64[]``."""
    return checksums(tensor.contiguous().view(-1).view(torch.uint8).unsqueeze(0))[0]


class CheckedTransport:
    """A transport that sends a seal of 8 bytes with each payload of an all-gather, all-to-all, exchange or broadcast.

    An all-reduce cannot have one, since what arrives is a sum that nobody has sent. A seal is made of the payload's
    checksum, its sender and the collective's number, so that a payload of another step does not pass either. Seals go
    right behind their payloads, as a collective of the same kind: so no payload is copied to make room for its seal,
    and checksums are taken while payloads are on their way. Their bytes are metered.

    Args:
        inner: What sends.
        meter: Told of the bytes that come on top.
    """

    def __init__(self, inner: Line, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter
        self._number = 0
        self.rank = inner.rank
        self.world_size = inner.world_size
        checksum_of(torch.zeros(1, dtype=torch.float32))  # so that nothing is left to compile within a step

    def all_reduce(self, buffer: Tensor, operation: dist.ReduceOp.RedOpType) -> Pending:
        """Passes ``buffer`` on, unchecked."""
        return self._inner.all_reduce(buffer, operation)

    def broadcast(self, buffer: Tensor, source: int) -> Pending:
        """Overwrites ``buffer`` with that of rank ``source``, and checks it."""
        number, data = self._next(), buffer.view(-1).view(torch.uint8).unsqueeze(0)
        pending = self._inner.broadcast(buffer, source)
        seals = self._seals(data, number) if self.rank == source else data.new_empty((1, SEAL_BYTES))
        self._meter.broadcast(seals.nbytes, (self.rank - source) % self.world_size, self.world_size)
        sealing = self._inner.broadcast(seals.view(-1), source)

        def wait() -> Tensor:
            came = pending()
            self._check(came.view(-1).view(torch.uint8)[None], sealing()[None], number, "broadcast", [source])
            return came

        return wait

    def exchange(self, payload: Tensor, partner: int) -> Pending:
        """Swaps ``payload`` with rank ``partner``, and checks what came."""
        number = self._next()
        pending = self._inner.exchange(payload, partner)
        if partner == self.rank:
            return pending
        seals = self._seals(payload[None], number)
        self._meter.exchange(seals.nbytes)
        sealing = self._inner.exchange(seals.view(-1), partner)
        return lambda: self._check(pending()[None], sealing()[None], number, "exchange", [partner])[0]

    def all_gather(self, payload: Tensor, straight: bool = False) -> Pending:
        """Collects ``uint8[b]`` from all workers as ``uint8[n, b]``, and checks each row."""
        number = self._next()
        pending = self._inner.all_gather(payload, straight)
        seals = self._seals(payload[None], number)
        self._meter.all_gather(seals.nbytes, self.world_size)
        sealing = self._inner.all_gather(seals.view(-1), straight)
        return lambda: self._check(pending(), sealing(), number, "all-gather", range(self.world_size))

    def all_to_all(self, payloads: Tensor) -> Pending:
        """Sends row ``r`` of ``uint8[n, b]`` to rank ``r``, and checks each row that comes."""
        number = self._next()
        pending = self._inner.all_to_all(payloads)
        seals = self._seals(payloads, number)
        self._meter.all_to_all(seals.nbytes, self.world_size)
        sealing = self._inner.all_to_all(seals)
        return lambda: self._check(pending(), sealing(), number, "all-to-all", range(self.world_size))

    def look(self) -> None:
        """Looks after what is under way."""
        self._inner.look()

    def abort(self) -> None:
        """Breaks off what is under way."""
        self._inner.abort()

    def close(self) -> None:
        """Leaves the other workers."""
        self._inner.close()

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _seals(self, rows: Tensor, number: int) -> Tensor:
        """What goes with this rank's rows ``uint8[n, b]``: ``uint8[n, 8]``."""
        return _sealed(checksums(rows), [key_of(number, self.rank)] * len(rows)).unsqueeze(1).view(torch.uint8)

    def _check(self, rows: Tensor, seals: Tensor, number: int, operation: str, senders: Sequence[int]) -> Tensor:
        """The rows ``uint8[n, b]`` that came from ``senders``; raises PayloadError if one was changed."""
        due = _sealed(checksums(rows), [key_of(number, sender) for sender in senders]).unsqueeze(1).view(torch.uint8)
        right = (due == seals).all(1)

        def error() -> PayloadError:
            ranks = ", ".join(str(senders[row]) for row in (~right).nonzero().view(-1).tolist())
            return PayloadError(
                f"the {operation} of {rows.shape[1]} bytes from rank {ranks} to rank {self.rank} does not fit its "
                "checksum: the bytes were changed on their way, or the ranks are at different collectives; look at the "
                "network and memory of these machines, and start all workers again from the last checkpoint"
            )

        expect(right.all(), error)
        return rows


def _words(rows: Tensor) -> Tensor:
    """``uint8[n, b]`` as 4-byte words: as it lies, or copied and filled up with zeros if that is between words."""
    count, width = rows.shape
    if rows.is_contiguous() and width % 4 == 0 and rows.storage_offset() % 4 == 0:
        return rows.view(torch.int32)
    padded = torch.zeros((count, -(-width // 4) * 4), dtype=torch.uint8, device=rows.device)
    padded[:, :width] = rows
    return padded.view(torch.int32)


def _sealed(sums: Tensor, keys: Sequence[int]) -> Tensor:
    return (sums + placed(np.array([_signed(key) for key in keys]), sums.device)).mul_(SPREAD)


def _signed(value: int) -> int:
    """A 64-bit number as torch writes it."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value
