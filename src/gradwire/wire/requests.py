"""What a method asks of the wire, and how generators that ask run together."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gradwire.errors import ConfigurationError

Circle = Literal["all", "node", "peers"]
"""Who takes part: all workers; those of one node; or those that have the same place in each of the nodes."""

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
"""What gloo and NCCL both reduce; of the others, such as ``int16``, collectives know nothing."""

AS_BYTES = "such as values.flatten().view(torch.uint8)"
"""How tensors become payloads, for messages."""


@dataclass(frozen=True, eq=False)
class Request:
    """What is asked for, of which a round may have many.

    Attributes:
        payload: What this rank brings.
        among: Who takes part; ranks and their number are those of this circle.

    Raises:
        ConfigurationError: If the payload is none that can be sent so.
    """

    wants: ClassVar[str] = "a tensor"
    payload: Tensor
    among: Circle = field(default="all", kw_only=True)

    def __post_init__(self) -> None:
        payload: object = self.payload
        if not (isinstance(payload, Tensor) and self.fits(payload)):
            given = f"{payload.dtype}, {tuple(payload.shape)}" if isinstance(payload, Tensor) else repr(payload)
            raise ConfigurationError(f"{type(self).__name__} was given {given}; give it {self.wants}")

    @staticmethod
    def fits(payload: Tensor) -> bool:
        """Whether a payload can be sent so."""
        return True


@dataclass(frozen=True, eq=False)
class AllReduceMean(Request):
    """Average a floating-point tensor over all workers.

    The answer has the tensor's shape and dtype. The wire may use the tensor's storage for it, so its former
    content is gone.

    What goes ``beside`` others has a collective of its own, and does not count for when a round is issued: it changes
    nothing of what they are fused with, and so not a bit of their sums.

    What may be ``late`` is gathered until a round has an average to share, or to the end of the step, so that nothing
    else waits for it: small all-reduces are chains of messages, each of which queues behind what is on the links.
    """

    wants = "float32, float64, float16 or bfloat16; AllReduceSum adds whole numbers"
    beside: bool = False
    late: bool = False

    @staticmethod
    def fits(payload: Tensor) -> bool:
        """Whether a payload can be sent so."""
        return payload.dtype in FLOATS


@dataclass(frozen=True, eq=False)
class AllReduceSum(Request):
    """Add an integer tensor over all workers; whoever asks knows that the sum fits the dtype.

    The answer has the tensor's shape and dtype. The wire may use the tensor's storage for it.
    """

    wants = "int8, uint8, int32 or int64; AllReduceMean averages floating-point tensors"

    @staticmethod
    def fits(payload: Tensor) -> bool:
        """Whether a payload can be sent so."""
        return payload.dtype in INTEGERS


@dataclass(frozen=True, eq=False)
class AllReduceMax(Request):
    """The largest of all workers' values, element by element.

    The answer has the tensor's shape and dtype. The wire may use the tensor's storage for it. What becomes of NaN is
    not defined: send infinity in its place.
    """

    wants = "float32, float64, float16, bfloat16, int8, uint8, int32 or int64"

    @staticmethod
    def fits(payload: Tensor) -> bool:
        """Whether a payload can be sent so."""
        return payload.dtype in (*FLOATS, *INTEGERS)


@dataclass(frozen=True, eq=False)
class Broadcast(Request):
    """Give everybody what rank ``source`` has; the others bring a tensor of the same shape and dtype to write to.

    The answer has the tensor's shape and dtype.
    """

    wants = "what collectives know, such as float32 or int32; of others the bytes, values.view(torch.uint8)"
    source: int

    @staticmethod
    def fits(payload: Tensor) -> bool:
        """Whether a payload can be sent so."""
        return payload.dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128)


@dataclass(frozen=True, eq=False)
class Exchange(Request):
    """Swap a payload, ``uint8[b]`` with ``b`` the same on all ranks, with rank ``partner``.

    Who has no partner in a round names itself and gets its own payload back. The answer is ``uint8[b]``.
    """

    wants = f"uint8[b], {AS_BYTES}"
    partner: int

    @staticmethod
    def fits(payload: Tensor) -> bool:
        """Whether a payload can be sent so."""
        return payload.dtype == torch.uint8 and payload.dim() == 1


@dataclass(frozen=True, eq=False)
class AllGather(Request):
    """Give a payload, ``uint8[b]`` with ``b`` the same on all ranks, to all workers.

    The answer is ``uint8[n, b]``, row ``r`` from rank ``r``.

    One that is ``straight`` goes from each worker to each other instead of along a ring. By itself a ring is faster, at
    94 % of the link's rate against 83 %; next to all-to-alls each of its steps queues behind their bytes, and the two
    together take 1.35 times the link's time, 1.15 times if both are straight (100 Mbit/s, 2026-11-21).
    """

    wants = f"uint8[b], {AS_BYTES}"
    straight: bool = False

    @staticmethod
    def fits(payload: Tensor) -> bool:
        """Whether a payload can be sent so."""
        return payload.dtype == torch.uint8 and payload.dim() == 1


@dataclass(frozen=True, eq=False)
class AllToAll(Request):
    """Give row ``r`` of ``uint8[n, b]`` to rank ``r``.

    The answer is ``uint8[n, b]``, row ``r`` from rank ``r``.
    """

    wants = f"uint8[n, b], a row for each rank, {AS_BYTES}"

    @staticmethod
    def fits(payload: Tensor) -> bool:
        """Whether a payload can be sent so."""
        return payload.dtype == torch.uint8 and payload.dim() == 2


Synchronization = Generator[Request | list[Request], Any, None]
"""A method at work on one block: yields a request and receives its answer, or a list of requests and theirs.

Who asks for an empty list gets one at once, which is no round.
"""

Rounds = Generator[list[Request], list[Tensor], None]
"""Several synchronizations at work together: yields the requests of a round, receives their answers."""


def lockstep(synchronizations: Sequence[Synchronization]) -> Rounds:
    """Runs synchronizations side by side: the k-th round holds the k-th requests of each that has any.

    Args:
        synchronizations: Fresh generators; all of them run to their end.
    """
    waiting = [(each, asked) for each in synchronizations if (asked := _advance(each, None)) is not None]
    while waiting:
        answers = yield [request for _, asked in waiting for request in _as_list(asked)]
        ready, waiting = waiting, []
        for synchronization, asked in ready:
            count = len(_as_list(asked))
            taken, answers = answers[:count], answers[count:]
            following = _advance(synchronization, taken if isinstance(asked, list) else taken[0])
            if following is not None:
                waiting.append((synchronization, following))


def late(synchronization: Synchronization) -> Synchronization:
    """The same, but whatever average it asks for may come at the end of the step."""
    return _asking(
        synchronization, lambda request: replace(request, late=True) if isinstance(request, AllReduceMean) else request
    )


def among(circle: Circle, synchronization: Synchronization) -> Synchronization:
    """The same, but with a circle of workers for all of them."""
    return _asking(synchronization, lambda request: replace(request, among=circle))


def _asking(synchronization: Synchronization, changed: Callable[[Request], Request]) -> Synchronization:
    """The same, with changed requests."""
    asked = _advance(synchronization, None)
    while asked is not None:
        requests = [changed(each) for each in _as_list(asked)]
        asked = _advance(synchronization, (yield requests if isinstance(asked, list) else requests[0]))


def _advance(synchronization: Synchronization, answer: Tensor | list[Tensor] | None) -> Request | list[Request] | None:
    """Takes one synchronization to its next requests, of which there is at least one; None at its end."""
    try:
        asked = next(synchronization) if answer is None else synchronization.send(answer)
        while not _as_list(asked):
            asked = synchronization.send([])
    except StopIteration:
        return None
    return asked


def _as_list(asked: Request | list[Request]) -> list[Request]:
    asked = asked if isinstance(asked, list) else [asked]
    if not all(isinstance(each, Request) for each in asked):
        wrong = next(each for each in asked if not isinstance(each, Request))
        raise ConfigurationError(
            f"a method yielded {type(wrong).__name__}; yield a request or a list of requests, such as "
            "gradwire.wire.AllReduceMean(tensor)"
        )
    return asked
