"""How bytes reach the other workers: the collectives the wire needs, and what each of them sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Pending = Callable[[], Tensor]
"""A collective on its way; calling it waits for the result."""


class Transport(Protocol):
    """The other workers, as the scheduler sees them. Collectives match by the order in which they are issued."""

    rank: int
    world_size: int

    def all_reduce(self, buffer: Tensor, operation: dist.ReduceOp.RedOpType) -> Pending:
        """Sums ``buffer`` over all workers, or takes the largest values, in place."""
        ...

    def broadcast(self, buffer: Tensor, source: int) -> Pending:
        """Overwrites ``buffer`` with that of rank ``source``."""
        ...

    def exchange(self, payload: Tensor, partner: int) -> Pending:
        """Swaps ``payload`` with rank ``partner``; this rank itself is a partner, too."""
        ...

    def all_gather(self, payload: Tensor) -> Pending:
        """Collects ``uint8[b]`` from all workers as ``uint8[n, b]``."""
        ...

    def all_to_all(self, payloads: Tensor) -> Pending:
        """Sends row ``r`` of ``uint8[n, b]`` to rank ``r``; row ``r`` of the result came from there."""
        ...


class Alone:
    """A world of one worker: every collective is the identity."""

    rank = 0
    world_size = 1

    def all_reduce(self, buffer: Tensor, operation: dist.ReduceOp.RedOpType) -> Pending:
        """Returns ``buffer``."""
        return lambda: buffer

    def broadcast(self, buffer: Tensor, source: int) -> Pending:
        """Returns ``buffer``."""
        return lambda: buffer

    def exchange(self, payload: Tensor, partner: int) -> Pending:
        """Returns ``payload``."""
        return lambda: payload

    def all_gather(self, payload: Tensor) -> Pending:
        """Returns ``payload`` as the only row."""
        return lambda: payload.unsqueeze(0)

    def all_to_all(self, payloads: Tensor) -> Pending:
        """Returns ``payloads``."""
        return lambda: payloads


# torch 2.13 renames this collective; the older name is all that 2.11 has.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ProcessGroupTransport:
    """Collectives of a ``torch.distributed`` process group, issued asynchronously.

    Args:
        group: The group; nothing else may issue collectives on it while the wire does.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def all_reduce(self, buffer: Tensor, operation: dist.ReduceOp.RedOpType) -> Pending:
        """Sums ``buffer`` over all workers, or takes the largest values, in place."""
        return _pending([dist.all_reduce(buffer, operation, group=self._group, async_op=True)], buffer)

    def broadcast(self, buffer: Tensor, source: int) -> Pending:
        """Overwrites ``buffer`` with that of rank ``source``."""
        return _pending([dist.broadcast(buffer, group=self._group, group_src=source, async_op=True)], buffer)

    def exchange(self, payload: Tensor, partner: int) -> Pending:
        """Swaps ``payload`` with rank ``partner``; this rank itself is a partner, too."""
        if partner == self.rank:
            return lambda: payload
        received = torch.empty_like(payload)
        works = [
            dist.irecv(received, group=self._group, group_src=partner),
            dist.isend(payload, group=self._group, group_dst=partner),
        ]
        return _pending(works, received)

    def all_gather(self, payload: Tensor) -> Pending:
        """Collects ``uint8[b]`` from all workers as ``uint8[n, b]``."""
        rows = torch.empty((self.world_size, payload.numel()), dtype=payload.dtype, device=payload.device)
        return _pending([_all_gather_single(rows.view(-1), payload, group=self._group, async_op=True)], rows)

    def all_to_all(self, payloads: Tensor) -> Pending:
        """Sends row ``r`` of ``uint8[n, b]`` to rank ``r``; row ``r`` of the result came from there."""
        rows = torch.empty_like(payloads)
        if payloads.device.type != "cpu":
            return _pending([dist.all_to_all_single(rows, payloads, group=self._group, async_op=True)], rows)
        # On gloo, transfers that are all posted at once take three quarters of the time of its all-to-all.
        rows[self.rank].copy_(payloads[self.rank])
        others = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        works = [dist.irecv(rows[other], group=self._group, group_src=other) for other in others]
        works += [dist.isend(payloads[other], group=self._group, group_dst=other) for other in others]
        return _pending(works, rows)


def _pending(works: Sequence[dist.Work | None], result: Tensor) -> Pending:
    """Pairs work handles with the buffer they fill; a handle's own result differs between backends."""

    def wait() -> Tensor:
        for work in works:
            if work is not None:
                work.wait()
        return result

    return wait
