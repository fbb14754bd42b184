"""Values that the host acts on: at once where they are the host's own, a step later where a device computes them.

Between a gradient and its average the host never waits for a device. So what kernels find out they return as a flag or
a count, a tensor of no dimension on the device of their other tensors. Reading one that lies on the CPU costs nothing;
one that lies on a device is left to kernels (:func:`chosen`, :func:`copy_where`), and what the host itself must know
of it goes to pinned memory and is read when the next step begins (:func:`learn`, :func:`expect`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Flag: TypeAlias = Tensor
"""Whether something holds: ``bool[]``."""

Count: TypeAlias = Tensor
"""How many there are: ``int64[]``."""

_NO, _YES = torch.tensor(False, device="cpu"), torch.tensor(True, device="cpu")


def flag(holds: bool) -> Flag:
    """What the host has found out; not to be changed in place."""
    return _YES if holds else _NO


def at_hand(values: Tensor) -> bool:
    """Whether the host may read values without waiting for anybody."""
    return values.device.type == "cpu"


def known(holds: Flag) -> bool:
    """Whether a flag holds and the host knows it without waiting, so that a shorter way may be taken.

    What is done otherwise must be right whether or not the flag holds.
    """
    return at_hand(holds) and bool(holds)


def chosen(holds: Flag, yes: Tensor, no: Tensor) -> Tensor:
    """``yes`` where a flag holds, else what ``no`` has; not a copy where the host knows that it holds."""
    return yes if known(holds) else torch.where(holds, yes, no)


def copy_where(holds: Flag, source: Tensor, target: Tensor) -> None:
    """Overwrites ``target`` with ``source`` if a flag holds."""
    if known(holds):
        target.copy_(source)
    else:
        torch.where(holds, source, target, out=target)


def placed(array: np.ndarray[Any, np.dtype[Any]], device: torch.device) -> Tensor:
    """The host's numbers on a device: the same memory where that is the CPU, else a copy that nobody waits for."""
    numbers = torch.from_numpy(array)
    if device.type == "cuda":
        return numbers.pin_memory().to(device, non_blocking=True)
    return numbers.to(device)


def shared(array: np.ndarray[Any, np.dtype[Any]], device: torch.device) -> Tensor:
    """The same, there when this returns: for what outlives whoever asks first, and streams that know nothing of his.

    The host waits for the copy alone, which has a stream of its own, and for nothing else that the device is at.
    """
    numbers = torch.from_numpy(array)
    if device.type != "cuda":
        return numbers.to(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        return numbers.to(device)


def learn(values: Tensor, take: Callable[[Tensor], None]) -> None:
    """Has the host told of some values: at once on the CPU and where no step is under way, else in the next step.

    Args:
        values: On any device.
        take: Given them on the CPU.
    """
    later: Later | None = getattr(_collecting, "later", None)
    if later is None or at_hand(values):
        take(values.cpu())
    else:
        later.add(values, take)


def expect(holds: Flag, error: Callable[[], Exception]) -> None:
    """Raises what ``error`` makes unless a flag holds; when is said by :func:`learn`.

    Until then kernels go on, so they must stay within their buffers whatever bytes came.
    """

    def check(found: Flag) -> None:
        if not found:
            raise error()

    learn(holds, check)


class Later:
    """What devices compute in one step and the host is told in the next."""

    def __init__(self) -> None:
        self._collected: list[tuple[Tensor, Callable[[Tensor], None]]] = []
        self._waiting: list[tuple[Callable[[], Tensor], Callable[[Tensor], None]]] = []

    def add(self, values: Tensor, take: Callable[[Tensor], None]) -> None:
        """Has values come along with all others of the step; nobody may change them."""
        self._collected.append((values, take))

    def send(self) -> None:
        """Sends all on their way to the host, at the end of a step: those of a type in one copy."""
        collected, self._collected = self._collected, []
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for values, _ in collected:
            alike.setdefault((values.device, values.dtype), []).append(values)
        came = {key: _sent_together(each) for key, each in alike.items()}
        self._waiting += [(next(came[values.device, values.dtype]), take) for values, take in collected]

    def collecting(self) -> AbstractContextManager[None]:
        """What is to be learnt within, on this thread, is collected here."""
        return _Collecting(self)

    def settle(self) -> None:
        """Tells the host all that was collected; to be called before a step, when the last one's end is near.

        Raises:
            Exception: What was expected and is not so.
        """
        self.send()
        waiting, self._waiting = self._waiting, []
        for arrived, take in waiting:
            take(arrived())


class _Collecting:
    """No generator, since there are many in a step."""

    __slots__ = ("_before", "_later")

    def __init__(self, later: Later) -> None:
        self._later = later

    def __enter__(self) -> None:
        self._before: Later | None = getattr(_collecting, "later", None)
        _collecting.later = self._later

    def __exit__(self, *_: object) -> None:
        _collecting.later = self._before


_collecting = threading.local()


def sent_to_host(values: Tensor) -> Callable[[], Tensor]:
    """Starts to copy values to the host; what is returned waits for them and gives them."""
    if values.device.type != "cuda":
        return values.cpu
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    event = torch.cuda.current_stream(values.device).record_event()

    def arrived() -> Tensor:
        event.synchronize()
        return host

    return arrived


def _sent_together(several: Sequence[Tensor]) -> Iterator[Callable[[], Tensor]]:
    """The same for each of several, of one type, in one copy."""
    arrived = sent_to_host(several[0] if len(several) == 1 else torch.cat([each.reshape(-1) for each in several]))
    sizes = [each.numel() for each in several]

    def part(number: int, shape: torch.Size) -> Tensor:
        return torch.split(arrived().reshape(-1), sizes)[number].view(shape)

    for number, each in enumerate(several):
        yield partial(part, number, each.shape)
