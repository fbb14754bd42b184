"""Encodes and decodes a block segment by segment, whatever the code: the only loops over segments, runs and chunks.

A code's class chooses what it measures of a segment, how it writes a chunk, and how it adds one up again. Numba
compiles the loops for each class and keeps them on the disk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from gradwire.kernels.code import TRITS, Code
from gradwire.kernels.compensated import Compensated
from gradwire.kernels.cpu import _stages as stage
from gradwire.kernels.cpu._compiled import (
    Float32Array,
    UInt8Array,
    UInt32Array,
    array,
    compiled,
    inlined,
    rows_of_bytes,
)
from gradwire.kernels.cpu._scratch import Packed, Piece, Scratch, new_scratch
from gradwire.kernels.cpu._scratch import Payloads as Payloads
from gradwire.kernels.cpu._source import Source, form, of_segment, settle_all, source_of, within
from gradwire.kernels.parts import Part, of_runs, of_segments, side_by_side
from gradwire.kernels.reference._torch import CHUNK
from gradwire.layout import ALIGNMENT, Block, Int64Array
from gradwire.randomness import run_keys


def encode(code: Code, block: Block, source: Compensated, payload: Tensor, key: int) -> None:
    packed, size, head = array(payload), code.layout.body(block.positions), 4 * code.layout.words * block.segment_count
    packed[head:] = 0
    put_all(code, block, source_of(block, source), packed[:head].view(np.float32), packed[head : head + size], key)


def decode(code: Code, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
    words, size = code.layout.words, code.layout.body(block.positions)
    packed, stride = rows_of_bytes(payloads)
    head, scales = 4 * words * block.segment_count, packed.view(np.float32)
    rows = Payloads(scales, stride // 4, packed[head:], stride, size, len(payloads), words)
    read_all(code, block, rows, out, weight)


def put_all(code: Code, block: Block, source: Source, scales: Float32Array, body: UInt8Array, key: int) -> None:
    """Writes a body of zeros, and the scales unless they are agreed."""
    words, bits, mark = code.layout

    def put(part: Part) -> None:
        values, own = within(source, part.block), scales[words * part.segment :]
        keys = run_keys(key, part.block.streams).view(np.uint32).reshape(-1, 2)
        _encode(code, words, bits, mark, values, part.block.origins, keys, own, body, new_scratch())

    parts = [Part(block, 0, 0, 0)] if bits == TRITS else of_segments(block)  # digits of several runs are in a byte
    side_by_side(put, parts)


def read_all(code: Code, block: Block, payloads: Payloads, out: Tensor, weight: float) -> None:
    """Writes the weighted sum of payloads."""
    bits, target = code.layout.bits, array(out)

    def read(part: Part) -> None:
        first = payloads.words * part.segment
        own = payloads._replace(scales=payloads.scales[first:]) if first else payloads
        pieces, runs, segments = np.empty((CHUNK // ALIGNMENT, 5), np.int64), part.block.runs, part.block.segments
        _decode(code, bits, runs, segments, own, target, np.float32(weight), pieces, new_scratch())

    side_by_side(read, of_runs(block))


@inlined
def first_position(runs: Int64Array) -> np.int64:
    """Of a block or a part of one."""
    return runs[0, 2] if len(runs) else np.int64(0)


@compiled
def _encode(
    code: Any,
    words: int,
    bits: int,
    mark: int,
    source: Source,
    origins: Int64Array,
    keys: UInt32Array,
    scales: Float32Array,
    body: UInt8Array,
    scratch: Scratch,
) -> None:
    runs, segments, t, codes = source.runs, source.segments, scratch.t, scratch.codes
    filled, position = 0, first_position(runs)
    for segment in range(segments.size - 1):
        scale = scales[words * segment : words * (segment + 1)]
        values = of_segment(source, segment)
        finite = stage.measure(code, values, scale, scratch)
        if not finite:
            scale[:] = np.nan
            if source.keep:
                settle_all(values)
        for run in range(segments[segment], segments[segment + 1]):
            start, length = runs[run, 0], runs[run, 1]
            for first in range(0, length, CHUNK):
                numel = min(CHUNK, length - first)
                if filled + numel > CHUNK:
                    stage.write(code, bits, position, filled, body, codes, t)
                    position += filled
                    filled = 0
                low, high, begin, end = filled, filled + numel, start + first, start + first + numel
                if finite:
                    form(source, begin, end, t[low:high])
                    memory, own, origin = source.residual[begin:end], keys[run], origins[run] + first
                    stage.put(code, Piece(low, high, memory, source.keep, own[0], own[1], origin), scale, scratch)
                else:
                    t[low:high] = 0
                    codes[low:high] = mark
                filled = -(-high // ALIGNMENT) * ALIGNMENT
                for gap in range(high, filled):
                    t[gap] = 0
                    codes[gap] = 0
    if filled:
        stage.write(code, bits, position, filled, body, codes, t)


@compiled
def _decode(
    code: Any,
    bits: int,
    runs: Int64Array,
    segments: Int64Array,
    payloads: Payloads,
    out: Float32Array,
    weight: np.float32,
    pieces: Int64Array,
    scratch: Scratch,
) -> None:
    count, filled, position = 0, 0, first_position(runs)
    for segment in range(segments.size - 1):
        for run in range(segments[segment], segments[segment + 1]):
            start, length = runs[run, 0], runs[run, 1]
            for first in range(0, length, CHUNK):
                numel = min(CHUNK, length - first)
                if filled + numel > CHUNK:
                    _sum(code, bits, pieces[:count], payloads, out, weight, scratch)
                    position += filled
                    count = filled = 0
                piece = pieces[count]
                piece[0], piece[1], piece[2], piece[3] = filled, filled + numel, segment, start + first
                piece[4] = position
                count += 1
                filled = -(-(filled + numel) // ALIGNMENT) * ALIGNMENT
    if count:
        _sum(code, bits, pieces[:count], payloads, out, weight, scratch)


@compiled
def _sum(
    code: Any,
    bits: int,
    pieces: Int64Array,
    payloads: Payloads,
    out: Float32Array,
    weight: np.float32,
    scratch: Scratch,
) -> None:
    """Sums the pieces of a chunk: where each begins and ends in it, its segment, where it goes to, and what precedes.

    That is the number of positions before the chunk, the same for all of them.
    """
    t, words, position = scratch.t, payloads.words, pieces[0, 4]
    filled = -(-pieces[-1, 1] // ALIGNMENT) * ALIGNMENT
    for row in range(payloads.rows):
        body = payloads.bodies[row * payloads.stride : row * payloads.stride + payloads.size]
        stage.read(code, bits, position, filled, body, scratch.codes, scratch.parts)
        codes = body[position : position + filled] if bits >= 8 else scratch.codes[:filled]
        stage.look_up(code, codes, scratch.parts, scratch)
        for piece in range(len(pieces)):
            low, high = pieces[piece, 0], pieces[piece, 1]
            base = row * payloads.scales_stride + words * pieces[piece, 2]
            scale, total = payloads.scales[base : base + words], t[low:high]
            packed = Packed(bits, row, body, position + low)
            stage.add(code, packed, codes[low:high], scratch.parts[low:high], scale, total)
    for piece in range(len(pieces)):
        low, high, start = pieces[piece, 0], pieces[piece, 1], pieces[piece, 3]
        source, target = t[low:high], out[start : start + high - low]
        for i in range(target.size):
            target[i] = source[i] * weight
