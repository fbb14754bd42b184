"""All workers of a world in one process: the same methods, with answers computed where others would send."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.layout import Slot
from gradwire.train.configuration import Configuration
from gradwire.train.engine import Engine
from gradwire.wire import (
    AllGather,
    AllReduceMax,
    AllReduceMean,
    AllReduceSum,
    AllToAll,
    Broadcast,
    Exchange,
    Meter,
    Request,
    lockstep,
)
from gradwire.wire.requests import Rounds


@dataclass(frozen=True)
class Step:
    """What one average took on rank 0.

    Attributes:
        written_bytes: Payloads that rank 0 wrote, all rounds together.
        sent_bytes: What rank 0 would have handed over to be sent.
        encode_seconds: Until the first payload was written.
        decode_seconds: From the first answer on, what is encoded again in later rounds included.
    """

    written_bytes: int
    sent_bytes: int
    encode_seconds: float
    decode_seconds: float


class Together:
    """A world of workers that average gradients of one layout, one after another in this process.

    Args:
        configuration: All choices.
        slots: Where the parameters lie in every gradient.
        workers: Number of workers.
    """

    def __init__(self, configuration: Configuration, slots: Sequence[Slot], workers: int) -> None:
        self._engines = [Engine(configuration, rank, workers, torch.device("cpu")) for rank in range(workers)]
        self._units = [engine.unit(slots) for engine in self._engines]

    def average(self, gradients: Sequence[Tensor]) -> Step:
        """Averages ``float32`` flat gradients, one of each worker, in place."""
        rounds = [
            lockstep(engine.synchronizations(unit, gradient))
            for engine, unit, gradient in zip(self._engines, self._units, gradients, strict=True)
        ]
        meter, written = Meter(), 0
        start = time.perf_counter()
        asked = [_advance(rounds[0], None)]
        encode_seconds, decode_seconds = time.perf_counter() - start, 0.0
        asked += [_advance(each, None) for each in rounds[1:]]
        while asked[0]:
            written += sum(request.payload.nbytes for request in asked[0])
            for request in asked[0]:
                _count(request, meter, len(rounds))
            answers = [list(rank) for rank in zip(*map(self.answer, zip(*asked, strict=True)), strict=True)]
            start = time.perf_counter()
            asked = [_advance(rounds[0], answers[0])]
            decode_seconds += time.perf_counter() - start
            asked += [_advance(each, answer) for each, answer in zip(rounds[1:], answers[1:], strict=True)]
        for engine in self._engines:
            engine.step += 1
        return Step(written, meter.wire_bytes, encode_seconds, decode_seconds)

    def answer(self, requests: Sequence[Request]) -> list[Tensor]:
        """What a collective gives each rank, from the requests that all ranks make at the same point."""
        payloads, count = [request.payload for request in requests], len(requests)
        match requests[0]:
            case AllReduceMean():
                return _for_all(torch.stack(payloads).mul_(1 / count).sum(0), count)
            case AllReduceSum():
                return _for_all(torch.stack(payloads).sum(0, dtype=payloads[0].dtype), count)
            case AllReduceMax():
                return _for_all(torch.stack(payloads).amax(0), count)
            case AllGather():
                return _for_all(torch.stack(payloads), count)
            case AllToAll():
                return [torch.stack([payload[rank] for payload in payloads]) for rank in range(count)]
            case Broadcast(source=source):
                return _for_all(payloads[source], count)
            case Exchange():
                return [payloads[each.partner].clone() for each in requests if isinstance(each, Exchange)]


def _advance(rounds: Rounds, answers: list[Tensor] | None) -> list[Request]:
    try:
        return next(rounds) if answers is None else rounds.send(answers)
    except StopIteration:
        return []


def _for_all(result: Tensor, count: int) -> list[Tensor]:
    """A copy for each rank, since a rank may write to its answer."""
    return [result.clone() for _ in range(count)]


def _count(request: Request, meter: Meter, workers: int) -> None:
    match request:
        case AllGather():
            meter.all_gather(request.payload.nbytes, workers)
        case AllToAll():
            meter.all_to_all(request.payload.nbytes, workers)
        case Broadcast(source=source):
            meter.broadcast(request.payload.nbytes, -source % workers, workers)
        case Exchange(partner=partner):
            meter.exchange(request.payload.nbytes if partner else 0)
        case _:
            meter.all_reduce(request.payload.nbytes, workers)
