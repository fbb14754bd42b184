"""Powers of two, drawn so that the mean is right."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradwire.kernels.reference._torch import (
    draws,
    keep,
    keep_all,
    largest,
    pack,
    padded,
    pieces_of,
    segment_of_positions,
    unpack,
    write_mean,
    write_payload,
)
from gradwire.layout import Block
from gradwire.randomness import run_keys

FRACTION_BITS = 23
"""Bits of a float32 below its exponent."""

LARGEST_EXPONENT = 254
"""The largest exponent field of a finite float32."""

NOT_FINITE = 255
"""The exponent field that marks a value of a segment that could not be sent."""

DISTANCES = 127
"""Exponents that 7 bits tell apart, beside zero."""


def power_of_two_payload_bytes(block: Block, bits: int) -> int:
    """See :meth:`gradwire.kernels.Kernels.power_of_two_payload_bytes`."""
    if bits == 8:
        return 4 * block.segment_count + block.positions
    return padded(block.positions + block.positions // 8)


def shift_below(peak: float) -> int:
    """How many exponent fields of float32 a segment with this largest magnitude goes without, to need 127 at most."""
    field = math.frexp(peak)[1] + 126 if peak else 0
    return max(0, min(field + 1, LARGEST_EXPONENT) - DISTANCES)


def power_of_two_encode(
    block: Block,
    gradient: Tensor,
    residual: Tensor | None,
    beta: float,
    gamma: float,
    payload: Tensor,
    bits: int,
    key: int,
) -> None:
    """See :meth:`gradwire.kernels.Kernels.power_of_two_encode`.

    The exponent is the exponent field of ``|t| + r``, where ``r`` is 23 random bits added to the fraction: it is one
    larger with the probability of the fraction. So denormal values become 0 or the smallest power, again without bias.
    With 8 bits ``|t|`` is first multiplied with ``2**-shift``: what falls below the smallest power becomes denormal.
    """
    keys = run_keys(key, block.streams).tolist()
    units = torch.ones(block.segment_count, device=gradient.device)
    fields = torch.zeros(block.positions, dtype=torch.int32, device=gradient.device)
    negative = torch.zeros(block.positions, dtype=torch.int32, device=gradient.device)
    for segment in range(block.segment_count):
        pieces = pieces_of(block, segment, gradient, residual, beta, gamma)
        peak = largest(pieces)
        if math.isnan(peak):
            units[segment] = torch.nan
            for piece in pieces:
                fields[piece.span] = 0 if bits == 8 else NOT_FINITE
            keep_all(pieces)
            continue
        shift = shift_below(peak) if bits == 8 else 0
        units[segment] = unit = gradient.new_tensor(2.0**shift)
        for piece in pieces:
            scaled = piece.t.abs() * gradient.new_tensor(2.0**-shift)
            random = (draws(block, keys, piece) >> 32 - FRACTION_BITS).int()
            field = (scaled.view(torch.int32) + random) >> FRACTION_BITS
            field = field.clamp(max=LARGEST_EXPONENT - shift)
            fields[piece.span] = field
            negative[piece.span] = (piece.t < 0).int()
            sent = (field << FRACTION_BITS).view(torch.float32) * unit
            keep(piece.memory, piece.t - torch.where(piece.t < 0, -sent, sent))
    if bits == 8:
        write_payload(payload, units, (fields | negative << 7).to(torch.uint8))
    else:
        write_payload(payload, fields.to(torch.uint8), pack(negative, 1))


def power_of_two_decode(block: Block, payloads: Tensor, out: Tensor, weight: float, bits: int) -> None:
    """See :meth:`gradwire.kernels.Kernels.power_of_two_decode`."""
    count = block.positions
    segments = segment_of_positions(block, out.device)
    rows = torch.zeros(len(payloads), count, device=out.device)
    for row, payload in zip(rows, payloads, strict=True):
        if bits == 8:
            head = 4 * block.segment_count
            codes = payload[head : head + count].int()
            magnitudes = ((codes & 127) << FRACTION_BITS).view(torch.float32)
            magnitudes = magnitudes * payload[:head].contiguous().view(torch.float32)[segments]
            negative = codes >> 7
        else:
            fields = payload[:count].int()
            magnitudes = (fields << FRACTION_BITS).view(torch.float32)
            magnitudes = magnitudes.masked_fill(fields == NOT_FINITE, torch.nan)
            negative = unpack(payload[count : count + count // 8], 1)
        row.copy_(torch.where(negative == 1, -magnitudes, magnitudes))
    write_mean(block, rows, out, weight)
