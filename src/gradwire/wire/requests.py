"""What a method asks of the wire, and how generators that ask run together."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AllReduceMean:
    """Average a floating-point tensor over all workers.

    The answer has the tensor's shape and dtype. The wire may use the tensor's storage for it, so its former
    content is gone.
    """

    payload: Tensor


@dataclass(frozen=True, eq=False)
class AllGather:
    """Give a payload, ``uint8[b]`` with ``b`` the same on all ranks, to all workers.

    The answer is ``uint8[n, b]``, row ``r`` from rank ``r``.
    """

    payload: Tensor


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Give row ``r`` of ``uint8[n, b]`` to rank ``r``.

    The answer is ``uint8[n, b]``, row ``r`` from rank ``r``.
    """

    payload: Tensor


Request = AllReduceMean | AllGather | AllToAll

Synchronization = Generator[Request, Tensor, None]
"""A method at work on one block: yields a request, receives its answer, and so on."""

Round = Generator[list[Request], Sequence[Tensor], None]
"""Several synchronizations at work together: yields the requests of a round, receives their answers."""


def lockstep(synchronizations: Sequence[Generator[Request, Tensor, Any]]) -> Round:
    """Runs synchronizations side by side: the k-th round holds the k-th request of each that has one.

    Args:
        synchronizations: Fresh generators; all of them run to their end.
    """
    waiting: list[tuple[Generator[Request, Tensor, Any], Request]] = []
    for synchronization in synchronizations:
        _advance(synchronization, None, waiting)
    while waiting:
        answers = yield [request for _, request in waiting]
        ready, waiting = waiting, []
        for (synchronization, _), answer in zip(ready, answers, strict=True):
            _advance(synchronization, answer, waiting)


def _advance(
    synchronization: Generator[Request, Tensor, Any],
    answer: Tensor | None,
    waiting: list[tuple[Generator[Request, Tensor, Any], Request]],
) -> None:
    """Takes one synchronization to its next request, or to its end."""
    try:
        request = next(synchronization) if answer is None else synchronization.send(answer)
    except StopIteration:
        return
    waiting.append((synchronization, request))
