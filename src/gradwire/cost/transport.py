"""Other workers that bring what this one does, over a network that exists in time only."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from gradwire.cost.clock import Clock
from gradwire.cost.network import Kind, Network, sum_of
from gradwire.wire.transport import Pending

Place = tuple[int | None, int]
"""A bucket, None where several share a collective, and a round."""


class ClockedTransport:
    """Rank 0 of workers that are all alike: its collectives take the time of some clocks.

    Tensors may be without values. Where they have some, every rank brings what this one does.

    Args:
        clocks: Told what travels when.
        network: Says what it takes.
        link: Which of a clock's links carries it.
    """

    rank = 0

    def __init__(self, clocks: Sequence[Clock], network: Network, link: str = "all") -> None:
        self._clocks = clocks
        self._link = link
        self.world_size = network.workers
        self._network = network
        self._places: dict[int, Place] = {}

    def asked(self, payload: Tensor, place: Place) -> None:
        """Told for which bucket and round a payload will be sent."""
        self._places[_storage(payload)] = place

    def all_reduce(self, buffer: Tensor, operation: dist.ReduceOp.RedOpType) -> Pending:
        """Sums ``buffer``, or leaves it as the largest."""
        summed = buffer if operation == dist.ReduceOp.MAX or buffer.is_meta else buffer.mul_(self.world_size)
        return self._sent(sum_of(buffer.dtype), buffer, summed)

    def broadcast(self, buffer: Tensor, source: int) -> Pending:
        """Leaves ``buffer`` as it is."""
        return self._sent("broadcast", buffer, buffer)

    def exchange(self, payload: Tensor, partner: int) -> Pending:
        """Brings the same back."""
        return (lambda: payload) if partner == self.rank else self._sent("exchange", payload, payload)

    def all_gather(self, payload: Tensor, straight: bool = False) -> Pending:
        """Brings the same from everybody."""
        kind: Kind = "straight all-gather" if straight else "all-gather"
        return self._sent(kind, payload, payload.expand(self.world_size, -1))

    def all_to_all(self, payloads: Tensor) -> Pending:
        """Brings row 0, which is this worker's, from everybody."""
        return self._sent("all-to-all", payloads, payloads[:1].expand_as(payloads))

    def _sent(self, kind: Kind, payload: Tensor, answer: Tensor) -> Pending:
        place = self._places.pop(_storage(payload), (None, 0))
        cost = self._network.cost(kind, payload.nbytes)
        transfers = [(clock, clock.send(cost, place, self._link)) for clock in self._clocks]

        def wait() -> Tensor:
            for clock, transfer in transfers:
                clock.until_there(transfer)
            return answer if answer.is_meta else answer.contiguous()

        return wait


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
