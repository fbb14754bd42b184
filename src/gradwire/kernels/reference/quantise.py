"""Encodes and decodes a block segment by segment, whatever the code."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from gradwire.kernels.code import NINE, TRITS, Code
from gradwire.kernels.compensated import Compensated
from gradwire.kernels.reference._torch import (
    as_bytes,
    draws,
    keep,
    pack,
    pieces_of,
    segment_of_positions,
    unpack,
    write_mean,
    write_payload,
)
from gradwire.kernels.reference.trits import pack_trits, unpack_trits
from gradwire.layout import Block
from gradwire.randomness import run_keys


def encode(code: Code, block: Block, source: Compensated, payload: Tensor, key: int) -> None:
    """Writes ``t`` by a code and leaves what was not sent in the residual.

    Args:
        code: How values are written.
        block: Which elements, in which segments.
        source: What ``t`` is made of.
        payload: ``uint8[payload_bytes(code, block)]``.
        key: For the numbers that a code draws.
    """
    scales = [
        code.measure([piece.t for piece in pieces_of(block, segment, source)]) for segment in range(block.segment_count)
    ]
    marked = torch.full((code.layout.words,), torch.nan, device=source.gradient.device, dtype=torch.float32)
    heads = [as_bytes(marked if scale is None else scale) for scale in scales]
    write_payload(payload, *heads, put_all(code, block, source, key, scales))


def decode(code: Code, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
    """``out = weight * sum of the decoded payloads`` over the runs, summed in row order.

    Args:
        code: As encoded.
        block: As encoded; its starts may lie in another buffer.
        payloads: ``uint8[n, payload_bytes(code, block)]``.
        out: ``float32`` flat buffer.
        weight: Usually 1 / n.
    """
    body, head = code.layout.body(block.positions), 4 * code.layout.words * block.segment_count
    rows = [
        read_all(code, block, payload[:head].contiguous().view(torch.float32), payload[head : head + body])
        for payload in payloads
    ]
    write_mean(block, torch.stack(rows), out, weight)


def put_all(code: Code, block: Block, source: Compensated, key: int, scales: Sequence[Tensor | None]) -> Tensor:
    """The body of a payload, written against the scales of its segments; None or NaN marks one that is not finite."""
    (_, bits, mark), keys = code.layout, run_keys(key, block.streams).tolist()
    codes = torch.zeros(block.positions, dtype=torch.int32, device=source.gradient.device)
    for segment, scale in enumerate(scales):
        for piece in pieces_of(block, segment, source):
            if scale is None or not scale.isfinite().all():
                codes[piece.span] = mark
                keep(piece.memory, piece.t)
            else:
                codes[piece.span] = code.put(piece.t, scale, partial(draws, block, keys, piece))
                keep(piece.memory, piece.t - code.read(codes[piece.span], scale[None]))
    if bits == NINE:
        return torch.cat((pack(codes & 255, 8), pack(codes >> 8, 1)))
    return pack_trits(codes) if bits == TRITS else pack(codes, bits)


def read_all(code: Code, block: Block, scales: Tensor, body: Tensor) -> Tensor:
    """What the body of a payload stands for, at all positions."""
    words, bits, _ = code.layout
    if bits == NINE:
        codes = unpack(body[: block.positions], 8) | unpack(body[block.positions :], 1) << 8
    else:
        codes = unpack_trits(body, block.positions) if bits == TRITS else unpack(body, bits)
    return code.read(codes, scales.view(block.segment_count, words)[segment_of_positions(block, body.device)])
