"""Collectives of what lies on a device over a backend that carries the host's memory only, such as gloo."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire import deferred
from gradwire.wire.sibling import carrier_of
from gradwire.wire.transport import Line, Pending, ProcessGroupTransport


class StagedTransport:
    """A transport whose payloads go through the host's memory, there and back.

    What is issued is first copied to pinned memory, for which the wire's thread waits: so it waits for what the device
    is at, as it never does otherwise. Backward goes on meanwhile.

    Args:
        inner: What sends, from the host.
        device: Where what is sent lies, and what arrives.
    """

    def __init__(self, inner: Line, device: torch.device) -> None:
        self._inner = inner
        self._device = device
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.look, self.abort, self.close = inner.look, inner.abort, inner.close

    def all_reduce(self, buffer: Tensor, operation: dist.ReduceOp.RedOpType) -> Pending:
        """Sums ``buffer`` over all workers, or takes the largest values, in place."""
        return self._in_place(buffer, lambda host: self._inner.all_reduce(host, operation))

    def broadcast(self, buffer: Tensor, source: int) -> Pending:
        """Overwrites ``buffer`` with that of rank ``source``."""
        return self._in_place(buffer, lambda host: self._inner.broadcast(host, source))

    def exchange(self, payload: Tensor, partner: int) -> Pending:
        """Swaps ``payload`` with rank ``partner``; this rank itself is a partner, too."""
        return self._brought(payload, lambda host: self._inner.exchange(host, partner))

    def all_gather(self, payload: Tensor, straight: bool = False) -> Pending:
        """Collects ``uint8[b]`` from all workers as ``uint8[n, b]``."""
        return self._brought(payload, lambda host: self._inner.all_gather(host, straight))

    def all_to_all(self, payloads: Tensor) -> Pending:
        """Sends row ``r`` of ``uint8[n, b]`` to rank ``r``; row ``r`` of the result came from there."""
        return self._brought(payloads, self._inner.all_to_all)

    def _in_place(self, buffer: Tensor, issue: Callable[[Tensor], Pending]) -> Pending:
        pending = issue(deferred.sent_to_host(buffer)())
        return lambda: buffer.copy_(pending(), non_blocking=True)

    def _brought(self, payload: Tensor, issue: Callable[[Tensor], Pending]) -> Pending:
        pending = issue(deferred.sent_to_host(payload)())
        return lambda: pending().to(self._device, non_blocking=True)


def transport_for(group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None = None) -> Line:
    """Collectives of a group of what lies on a device, staged where its backend for that carries too little.

    Args:
        group: As of :class:`~gradwire.wire.transport.ProcessGroupTransport`.
        device: Where what is sent lies.
        timeout: As there.
    """
    transport = ProcessGroupTransport(group, timeout)
    return transport if carrier_of(group, device) in (None, device) else StagedTransport(transport, device)
