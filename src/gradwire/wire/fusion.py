"""One round of many requests as few collectives: pack, issue, unpack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.errors import ConfigurationError, PayloadError
from gradwire.wire.circles import circle_of
from gradwire.wire.meter import Meter, Tally
from gradwire.wire.requests import (
    AllGather,
    AllReduceMax,
    AllReduceMean,
    AllToAll,
    Broadcast,
    Circle,
    Exchange,
    Request,
)
from gradwire.wire.transport import Pending, Transport

Flight = Callable[[], list[Tensor]]
"""A round on its way; calling it waits and returns the answers, in the order of the requests."""


def issue(requests: Sequence[Request], transport: Transport, meter: Meter) -> Flight:
    """Issues a round: one collective for each kind, circle, peer and dtype among the requests.

    Args:
        requests: The round, the same kinds, sizes and order on all ranks.
        transport: Where to send.
        meter: Told the bytes handed over.

    Returns:
        What to call for the answers; it raises PayloadError if the transport brings another shape or dtype than was
        asked for, so that methods may rely on both.
    """
    fused: dict[tuple[type, Circle, int | None, bool, bool, torch.dtype], list[int]] = {}
    for index, request in enumerate(requests):
        straight = isinstance(request, AllGather) and request.straight
        key = type(request), request.among, _peer(request), straight, goes_beside(request), request.payload.dtype
        fused.setdefault(key, []).append(index)
    landings = []
    for (kind, circle, peer, straight, _, _), indices in fused.items():
        line, tally = circle_of(transport, circle), meter.node if circle == "node" else meter
        payloads = [requests[index].payload for index in indices]
        landings.append((indices, _launch(kind, peer, straight, payloads, line, tally)))

    def land() -> list[Tensor]:
        answers: list[Tensor | None] = [None] * len(requests)
        for indices, landing in landings:
            for index, answer in zip(indices, landing(), strict=True):
                answers[index] = answer
        return [answer for answer in answers if answer is not None]

    return land


def _peer(request: Request) -> int | None:
    """The one other rank that a request is about, if there is one."""
    match request:
        case Broadcast(source=source):
            return source
        case Exchange(partner=partner):
            return partner
    return None


def goes_beside(request: Request) -> bool:
    """Whether a request must change nothing of what others are fused with."""
    return isinstance(request, AllReduceMean) and request.beside


def _launch(
    kind: type, peer: int | None, straight: bool, tensors: Sequence[Tensor], transport: Transport, meter: Tally
) -> Flight:
    """One collective for requests of one kind."""
    if peer is not None and not 0 <= peer < transport.world_size:
        raise ConfigurationError(
            f"{kind.__name__} names rank {peer} among {transport.world_size} workers; choose one from 0 to "
            f"{transport.world_size - 1}"
        )
    if kind is AllGather:
        return _all_gather(tensors, straight, transport, meter)
    if kind is AllToAll:
        return _all_to_all(tensors, transport, meter)
    buffer = _joined(tensors)
    pending: Pending
    if kind is Broadcast and peer is not None:
        meter.broadcast(buffer.nbytes, (transport.rank - peer) % transport.world_size, transport.world_size)
        pending = transport.broadcast(buffer, peer)
    elif kind is Exchange and peer is not None:
        meter.exchange(buffer.nbytes if peer != transport.rank else 0)
        pending = transport.exchange(buffer, peer)
    else:
        if kind is AllReduceMean and transport.world_size > 1:
            buffer.mul_(1 / transport.world_size)  # before the sum, so that half precision does not overflow
        meter.all_reduce(buffer.nbytes, transport.world_size)
        pending = transport.all_reduce(buffer, dist.ReduceOp.MAX if kind is AllReduceMax else dist.ReduceOp.SUM)

    def land() -> list[Tensor]:
        parts = torch.split(_landed(pending, buffer.shape, buffer.dtype), [tensor.numel() for tensor in tensors])
        parts = tuple(map(_readable, parts)) if kind in (Broadcast, Exchange) else parts
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    return land


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """All elements in one buffer, which is the tensor's own where there is only one."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _all_gather(payloads: Sequence[Tensor], straight: bool, transport: Transport, meter: Tally) -> Flight:
    payload = payloads[0].contiguous() if len(payloads) == 1 else torch.cat(list(payloads))
    meter.all_gather(payload.nbytes, transport.world_size)
    pending = transport.all_gather(payload, straight)
    shape = torch.Size((transport.world_size, payload.numel()))
    return lambda: _columns(_landed(pending, shape, payload.dtype), [part.numel() for part in payloads])


def _all_to_all(payloads: Sequence[Tensor], transport: Transport, meter: Tally) -> Flight:
    if wrong := [len(each) for each in payloads if len(each) != transport.world_size]:
        raise ConfigurationError(
            f"AllToAll was given {wrong[0]} rows among {transport.world_size} workers; give it a row for each rank"
        )
    rows = payloads[0].contiguous() if len(payloads) == 1 else torch.cat(list(payloads), dim=1)
    meter.all_to_all(rows.nbytes, transport.world_size)
    pending = transport.all_to_all(rows)
    return lambda: _columns(_landed(pending, rows.shape, rows.dtype), [part.shape[1] for part in payloads])


def _landed(pending: Pending, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """What came, which is the one place where bytes of others enter."""
    answer = pending()
    if answer.shape != shape or answer.dtype != dtype:
        raise PayloadError(
            f"a collective brought {answer.dtype} of shape {tuple(answer.shape)} where {dtype} of shape {tuple(shape)} "
            "was asked for; do all ranks run the same configuration?"
        )
    return answer


def _columns(rows: Tensor, widths: Sequence[int]) -> list[Tensor]:
    edges = accumulate(widths, initial=0)
    return [_readable(rows[:, start:stop]) for start, stop in pairwise(edges)]


def _readable(part: Tensor) -> Tensor:
    """Part of an answer; a copy where sizes that are no multiples of 4 kept it from being read as words."""
    steps = (part.storage_offset() * part.itemsize, *(step * part.itemsize for step in part.stride()[:-1]))
    return part.clone(memory_format=torch.contiguous_format) if any(step % 4 for step in steps) else part
