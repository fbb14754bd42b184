"""One round of many requests as few collectives: pack, issue, unpack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from gradwire.wire.meter import Meter
from gradwire.wire.requests import AllGather, AllReduceMean, AllToAll, Request
from gradwire.wire.transport import Transport

Flight = Callable[[], list[Tensor]]
"""A round on its way; calling it waits and returns the answers, in the order of the requests."""


def issue(requests: Sequence[Request], transport: Transport, meter: Meter) -> Flight:
    """Issues a round: one collective for each kind and dtype among the requests.

    Args:
        requests: The round, the same kinds, sizes and order on all ranks.
        transport: Where to send.
        meter: Told the bytes handed over.

    Returns:
        What to call for the answers.
    """
    fused: dict[tuple[type, torch.dtype], list[int]] = {}
    for index, request in enumerate(requests):
        fused.setdefault((type(request), request.payload.dtype), []).append(index)
    landings = [
        (indices, _LAUNCH[kind]([requests[i].payload for i in indices], transport, meter))
        for (kind, _), indices in fused.items()
    ]

    def land() -> list[Tensor]:
        answers: list[Tensor | None] = [None] * len(requests)
        for indices, landing in landings:
            for index, answer in zip(indices, landing(), strict=True):
                answers[index] = answer
        return [answer for answer in answers if answer is not None]

    return land


def _all_reduce(tensors: Sequence[Tensor], transport: Transport, meter: Meter) -> Flight:
    """Averages; every value is divided before the sum, so that half precision does not overflow."""
    share = 1 / transport.world_size
    if len(tensors) == 1 and tensors[0].is_contiguous():
        buffer = tensors[0].view(-1)
        if transport.world_size > 1:
            buffer.mul_(share)
    else:
        flat = [tensor.reshape(-1) for tensor in tensors]
        buffer = torch.cat(flat).mul_(share)
    meter.all_reduce(buffer.nbytes, transport.world_size)
    pending = transport.all_reduce_sum(buffer)

    def land() -> list[Tensor]:
        parts = torch.split(pending(), [tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    return land


def _all_gather(payloads: Sequence[Tensor], transport: Transport, meter: Meter) -> Flight:
    payload = payloads[0] if len(payloads) == 1 else torch.cat(list(payloads))
    meter.all_gather(payload.nbytes, transport.world_size)
    pending = transport.all_gather(payload)
    return lambda: _columns(pending(), [part.numel() for part in payloads])


def _all_to_all(payloads: Sequence[Tensor], transport: Transport, meter: Meter) -> Flight:
    rows = payloads[0] if len(payloads) == 1 else torch.cat(list(payloads), dim=1)
    meter.all_to_all(rows.nbytes, transport.world_size)
    pending = transport.all_to_all(rows)
    return lambda: _columns(pending(), [part.shape[1] for part in payloads])


def _columns(rows: Tensor, widths: Sequence[int]) -> list[Tensor]:
    edges = accumulate(widths, initial=0)
    return [rows[:, start:stop] for start, stop in pairwise(edges)]


_LAUNCH: dict[type, Callable[[Sequence[Tensor], Transport, Meter], Flight]] = {
    AllReduceMean: _all_reduce,
    AllGather: _all_gather,
    AllToAll: _all_to_all,
}
