"""How bytes reach the other workers: the collectives the wire needs, and what each of them sends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType
from torch.distributed import distributed_c10d

from gradwire.errors import GradwireError, WireError
from gradwire.wire.patience import Patience
from gradwire.wire.watch import Watch

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

    def all_gather(self, payload: Tensor, straight: bool = False) -> Pending:
        """Collects ``uint8[b]`` from all workers as ``uint8[n, b]``; ``straight`` from each, not along a ring."""
        ...

    def all_to_all(self, payloads: Tensor) -> Pending:
        """Sends row ``r`` of ``uint8[n, b]`` to rank ``r``; row ``r`` of the result came from there."""
        ...


class Line(Transport, Protocol):
    """A transport that can be watched, broken off, and left."""

    def look(self) -> None:
        """Raises WireError if a device has been at a collective for too long; may be called on any thread."""
        ...

    def abort(self) -> None:
        """Ends whatever is under way, here and on the other ranks, with an error; nothing can be sent any more."""
        ...

    def close(self) -> None:
        """Leaves the other workers when nothing is under way; to be called once, and nothing else after it."""
        ...


# torch 2.13 renames this collective; the older name is all that 2.11 has.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


_ABORT_TAG = 0x6757
"""A tag under which nothing is ever sent."""


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long a process group waits for a collective; None if its backend does not tell."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if isinstance(limit := getattr(options, "_timeout", None), timedelta):
            return limit
    return None


def failure_of(group: dist.ProcessGroup) -> str:
    """What a group's backends say has failed on their devices; empty if nothing has, or they do not tell."""
    failed = []
    for device in group._device_types:
        ask = getattr(group._get_backend(device), "get_error", None)
        with suppress(RuntimeError):  # gloo tells who waits
            if ask is not None and (found := ask()) != ErrorType.SUCCESS:
                failed.append(f"{device.type}: {found.name.lower().replace('_', ' ')}")
    return ", ".join(failed)


class _Transfer(NamedTuple):
    """A tensor that is sent to a rank, or comes from it."""

    tensor: Tensor
    peer: int
    sent: bool = False


class ProcessGroupTransport:
    """Collectives of a ``torch.distributed`` process group, issued asynchronously.

    What fails, or takes longer than the timeout, raises :class:`~gradwire.errors.WireError`.

    Args:
        group: The group; nothing else may issue collectives on it while the wire does. Closing destroys it, unless
            torch keeps no record of it, as of those that torchft makes.
        timeout: How long a collective may take, the group's if None; on other devices than the CPU it must be shorter
            than that, or the backend ends the process before anybody can say what happened.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta | None = None) -> None:
        self._group = group
        self._timeout = timeout_of(group) if timeout is None else timeout
        self._watch = Watch(self._timeout, lambda: failure_of(self._group))  # which closing lets go of
        self._recorded = group in distributed_c10d._world.pg_map
        self._patience = Patience(self._call_roll, self._timeout) if self._recorded and _on_gloo(group) else None
        self.rank = group.rank()
        self.world_size = group.size()

    def all_reduce(self, buffer: Tensor, operation: dist.ReduceOp.RedOpType) -> Pending:
        """Sums ``buffer`` over all workers, or takes the largest values, in place."""
        return self._begin(
            "all-reduce", buffer, lambda: dist.all_reduce(buffer, operation, group=self._group, async_op=True)
        )

    def broadcast(self, buffer: Tensor, source: int) -> Pending:
        """Overwrites ``buffer`` with that of rank ``source``."""
        return self._begin(
            f"broadcast from rank {source}",
            buffer,
            lambda: dist.broadcast(buffer, group=self._group, group_src=source, async_op=True),
        )

    def exchange(self, payload: Tensor, partner: int) -> Pending:
        """Swaps ``payload`` with rank ``partner``; this rank itself is a partner, too."""
        if partner == self.rank:
            return lambda: payload
        received = torch.empty_like(payload)
        return self._begin_all(
            f"exchange with rank {partner}", received, [_Transfer(received, partner), _Transfer(payload, partner, True)]
        )

    def all_gather(self, payload: Tensor, straight: bool = False) -> Pending:
        """Collects ``uint8[b]`` from all workers as ``uint8[n, b]``; on gloo a choice, elsewhere the backend's."""
        rows = torch.empty((self.world_size, payload.numel()), dtype=payload.dtype, device=payload.device)
        if straight and payload.device.type == "cpu":
            return self._post("all-gather", rows, payload.expand_as(rows))
        return self._begin(
            "all-gather", rows, lambda: _all_gather_single(rows.view(-1), payload, group=self._group, async_op=True)
        )

    def all_to_all(self, payloads: Tensor) -> Pending:
        """Sends row ``r`` of ``uint8[n, b]`` to rank ``r``; row ``r`` of the result came from there."""
        rows = torch.empty_like(payloads)
        if payloads.device.type != "cpu":
            return self._begin(
                "all-to-all", rows, lambda: dist.all_to_all_single(rows, payloads, group=self._group, async_op=True)
            )
        # On gloo, transfers that are all posted at once take three quarters of the time of its all-to-all.
        return self._post("all-to-all", rows, payloads)

    def _post(self, name: str, rows: Tensor, payloads: Tensor) -> Pending:
        """Posts all transfers at once: row ``r`` of ``payloads`` to rank ``r``, and ``rows`` from the others."""
        rows[self.rank].copy_(payloads[self.rank])
        receiving = [_Transfer(rows[other], other) for other in self._others()]
        sending = [_Transfer(payloads[other], other, True) for other in self._others()]
        return self._begin_all(name, rows, receiving + sending)

    def look(self) -> None:
        """Raises WireError if a device has been at a collective for longer than the timeout."""
        self._watch.look()

    def abort(self) -> None:
        """Ends whatever is under way, here and on the other ranks, with an error; nothing can be sent any more."""
        if (group := vars(self).get("_group")) is None:
            return  # it is closed
        if self._patience is not None:
            self._patience.break_off()
        with suppress(RuntimeError):
            group.abort()
        if torch.device("cpu") in group._device_types:
            # gloo has no abort of its own. A receive that times out makes it close all its connections; one from a rank
            # that is gone fails at once and closes none, and who waits for this one would wait on: so all are tried.
            for other in self._others():
                with suppress(RuntimeError):
                    _receive_nothing(group, other).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Destroys the group, and lets go of it: only when nobody holds it do its threads end."""
        with suppress(ValueError):  # it may have been destroyed with all others
            dist.destroy_process_group(self._group)
        if self._patience is not None:
            self._patience.close(self._group)
        del self._group

    def _others(self) -> list[int]:
        """The other ranks, from the next one on."""
        return [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]

    def _call_roll(self, ranks: Sequence[int]) -> None:
        """Raises RuntimeError if a connection is closed: then a receive fails as it is posted, else it is dropped."""
        for rank in ranks:
            _receive_nothing(self._group, rank)

    def _begin_all(self, name: str, result: Tensor, transfers: list[_Transfer]) -> Pending:
        """Issues transfers as one.

        NCCL does one after the other otherwise, and two ranks that both receive first wait for each other for ever.
        """
        group = self._group

        def start() -> list[dist.Work]:
            if result.device.type == "cpu":
                return [(group.send if each.sent else group.recv)([each.tensor], each.peer, 0) for each in transfers]
            each_way = {True: dist.isend, False: dist.irecv}
            together = [
                dist.P2POp(each_way[sent], tensor, group=group, group_peer=peer) for tensor, peer, sent in transfers
            ]
            return dist.batch_isend_irecv(together) if together else []

        return self._begin(name, result, start, [each.peer for each in transfers])

    def _begin(
        self,
        name: str,
        result: Tensor,
        start: Callable[[], dist.Work | list[dist.Work] | None],
        peers: list[int] | None = None,
    ) -> Pending:
        """Issues what fills ``result``; a work handle's own result differs between backends.

        Args:
            name: What it is.
            result: What it fills.
            start: Issues it.
            peers: The rank of each transfer that it consists of; None for a collective of all.
        """
        if self._recorded and self._group not in distributed_c10d._world.pg_map:
            raise GradwireError(
                "the process group was destroyed, and this handle's with it; close handles before "
                "torch.distributed.destroy_process_group, and attach again in the next one"
            )
        issued = time.monotonic()
        operation = described(name, result, self.world_size)
        with failing(operation, issued, self._timeout):
            started = start()
            works = started if isinstance(started, list) else [] if started is None else [started]
        landing = self._landing(works, peers, result.device)
        if result.device.type != "cpu":
            self._watch.add(operation, works, issued)

        def wait() -> Tensor:
            with failing(operation, issued, self._timeout):
                landing()
            return result

        return wait

    def _landing(self, works: list[dist.Work], peers: list[int] | None, device: torch.device) -> Callable[[], None]:
        """What waits for all of ``works``; on other devices than the CPU only their streams do."""
        if self._patience is not None and device.type == "cpu" and works:
            if peers is None:
                return self._patience.for_collective(works[0], self._others())
            return self._patience.for_transfers(works, peers)

        def wait() -> None:
            for work in works:
                # Elsewhere waiting with a timeout would block the CPU until the device is done.
                if self._timeout is not None and device.type == "cpu":
                    work.wait(self._timeout)
                else:
                    work.wait()

        return wait


def _on_gloo(group: dist.ProcessGroup) -> bool:
    cpu = torch.device("cpu")
    return cpu in group._device_types and group._get_backend(cpu).name() == "gloo"


def _receive_nothing(group: dist.ProcessGroup, source: int) -> dist.Work:
    """A receive that never ends."""
    return group.recv([torch.empty(1, dtype=torch.float32)], source, _ABORT_TAG)


def described(name: str, result: Tensor, world_size: int) -> str:
    """A collective, for messages."""
    others = world_size - 1
    return f"{name} of {readable(result.nbytes)} with {others} other{'s' if others != 1 else ''}"


@contextmanager
def failing(operation: str, issued: float, timeout: timedelta | None) -> Iterator[None]:
    """Says what failed where the backend does not.

    Raises:
        WireError: If what is done within fails.
    """
    try:
        yield
    except GradwireError:
        raise
    except (RuntimeError, ValueError) as error:  # the latter where torch's log has no record of the group
        limit = None if timeout is None else timeout.total_seconds()
        raise WireError(operation, time.monotonic() - issued, limit, str(error)) from error


def readable(nbytes: int) -> str:
    """A number of bytes in decimal units."""
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} bytes"
