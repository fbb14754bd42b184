"""Encodes and decodes a block segment by segment, whatever the code: the only loops over segments, runs and chunks.

A code's class chooses what it measures of a segment, how it writes a chunk, and how it adds one up again. Numba
compiles the loops for each class and keeps them on the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload
from torch import Tensor

from gradwire.kernels.code import TRITS, Code
from gradwire.kernels.compensated import Compensated
from gradwire.kernels.cpu._compiled import (
    INLINED,
    Float32Array,
    Float64Array,
    UInt8Array,
    UInt32Array,
    array,
    compiled,
    hash32,
    inlined,
    rows_of_bytes,
)
from gradwire.kernels.cpu._lanes import add_chunk, add_rest, sum_of_lanes
from gradwire.kernels.cpu._packed import add_bits, put_bits, read_codes, write_codes
from gradwire.kernels.cpu._scratch import Payloads as Payloads
from gradwire.kernels.cpu._scratch import Piece as Piece
from gradwire.kernels.cpu._scratch import Scratch as Scratch
from gradwire.kernels.cpu._scratch import new_scratch
from gradwire.kernels.cpu._source import Source as Source
from gradwire.kernels.cpu._source import form, of_segment, settle_all, source_of, within
from gradwire.kernels.cpu.trits import add_trits
from gradwire.kernels.parts import Part, of_runs, of_segments, side_by_side
from gradwire.kernels.reference._torch import CHUNK, LANES
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
def sums(code: Any, source: Source, scratch: Scratch) -> tuple[float, float, int]:
    """Sums of the two terms of all values, in the order the reference defines, and how many values are negative."""
    t, ones, others = scratch.parts, scratch.lanes[0], scratch.lanes[1]
    first, second, negatives, chunk = 0.0, 0.0, 0, 0
    for run in range(len(source.runs)):
        start, stop = source.runs[run, 0], source.runs[run, 0] + source.runs[run, 1]
        for low in range(start, stop, CHUNK):
            high = min(low + CHUNK, stop)
            form(source, low, high, t)
            _add_terms(code, t[: high - low], ones, others)
            first = add_chunk(first, chunk, sum_of_lanes(ones), scratch.lanes[2])
            second = add_chunk(second, chunk, sum_of_lanes(others), scratch.lanes[3])
            chunk += 1
            for i in range(high - low):
                negatives += t[i] < 0
    return add_rest(first, chunk, scratch.lanes[2]), add_rest(second, chunk, scratch.lanes[3]), negatives


@inlined
def _add_terms(code: Any, t: Float32Array, ones: Float64Array, others: Float64Array) -> None:
    """Adds up a chunk in lanes."""
    ones[:] = 0.0
    others[:] = 0.0
    whole = t.size // LANES * LANES
    for first in range(0, whole, LANES):
        row = t[first : first + LANES]
        for i in range(LANES):
            one, other = _terms(code, row[i])
            ones[i] += one
            others[i] += other
    for i in range(t.size - whole):
        one, other = _terms(code, t[whole + i])
        ones[i] += one
        others[i] += other


def put_each(code: Any, piece: Piece, scale: Float32Array, scratch: Scratch) -> None:
    """For codes that write every value by itself."""
    t, codes = scratch.t[piece.low : piece.high], scratch.codes[piece.low : piece.high]
    memory, keep, (one, other), counter = piece.memory, piece.keep, _units(code, scale), np.uint32(piece.origin)
    for i in range(t.size):
        number = _number(code, t[i], one, other, hash32(piece.low_key, piece.high_key, counter))
        codes[i] = np.uint8(number)
        if keep:
            memory[i] = t[i] - _value(code, number, one, other)
        counter = np.uint32(counter + np.uint32(1))


def put_signs(code: Any, piece: Piece, scale: Float32Array, scratch: Scratch) -> None:
    """For codes of one bit, which are packed from ``t`` itself."""
    t, memory, (one, other) = scratch.t[piece.low : piece.high], piece.memory, _units(code, scale)
    above, below = _value(code, np.int32(0), one, other), _value(code, np.int32(1), one, other)
    if piece.keep:
        for i in range(t.size):
            memory[i] = t[i] - (below if t[i] < 0 else above)


def scale_itself(code: Any, scale: Float32Array) -> tuple[np.float32, np.float32]:
    """The first number and the last one, which may be the same."""
    return scale[0], scale[scale.size - 1]


def inverse_and_scale(code: Any, scale: Float32Array) -> tuple[np.float32, np.float32]:
    """1 / scale, 0 for a scale that is not positive; and the scale."""
    return np.float32(np.float32(1) / scale[0]) if scale[0] > 0 else np.float32(0), scale[0]


def no_value(code: Any, number: np.int32, one: np.float32, other: np.float32) -> np.float32:
    """For codes of which parts are looked up."""
    return np.float32(0)


def no_parts(code: Any, codes: UInt8Array, parts: Float32Array, scratch: Scratch) -> None:
    """For codes of which each is added up by itself."""


def add_each(code: Any, codes: UInt8Array, parts: Float32Array, scale: Float32Array, total: Float32Array) -> None:
    """Adds what each code stands for."""
    one, other = _units(code, scale)
    for i in range(total.size):
        total[i] += _value(code, np.int32(codes[i]), one, other)


def add_parts(code: Any, codes: UInt8Array, parts: Float32Array, scale: Float32Array, total: Float32Array) -> None:
    """Adds parts of the scale."""
    unit = scale[0] if scale.size else np.float32(1)
    for i in range(total.size):
        total[i] += parts[i] * unit


@inlined
def leave_parts(t: Float32Array, parts: Float32Array, unit: np.float32, memory: Float32Array) -> None:
    """Leaves in the memory what parts of the scale do not stand for."""
    for i in range(t.size):
        memory[i] = t[i] - parts[i] * unit


class Compiled(NamedTuple):
    """What a code is to the loops: functions that are compiled into them.

    Attributes:
        measure: ``(code, source, scale, scratch) -> bool``: fills ``scale`` for a segment; False if a value is not
            finite.
        number: ``(code, t, one, other, random) -> int``: what a value is written as.
        value: ``(code, number, one, other) -> float``: what that stands for.
        units: ``(code, scale) -> (one, other)``: what both of these calculate with.
        put: ``(code, piece, scale, scratch)``: writes ``t`` to ``codes``, and leaves in the memory what is not sent.
        look_up: ``(code, codes, parts, scratch)``: writes what ``codes`` stand for to ``parts``, for those that are
            read faster so than each by itself.
        add: ``(code, codes, parts, scale, total)``: adds what codes, or parts, stand for to ``total``.
        terms: ``(code, t) -> (float, float)``: what :func:`sums` adds up, for codes that measure by it.
    """

    measure: Callable[..., Any]
    number: Callable[..., Any] | None = None
    value: Callable[..., Any] = no_value
    units: Callable[..., Any] = scale_itself
    put: Callable[..., Any] = put_each
    look_up: Callable[..., Any] = no_parts
    add: Callable[..., Any] = add_each
    terms: Callable[..., Any] | None = None


CODES: dict[type, Compiled] = {}
"""The codes that are compiled, by their class."""


def _stage(name: str) -> Any:
    """Calls a code's function of this name, which is chosen by the code's class where the caller is compiled."""

    def stage(code: Any, *others: Any) -> Any: ...

    overload(stage, jit_options=INLINED, strict=False)(lambda code, *_: getattr(CODES[code.instance_class], name))
    return stage


_measure, _number, _value, _units, _put, _look_up, _add, _terms = map(_stage, Compiled._fields)


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
        finite = _measure(code, values, scale, scratch)
        if not finite:
            scale[:] = np.nan
            if source.keep:
                settle_all(values)
        for run in range(segments[segment], segments[segment + 1]):
            start, length = runs[run, 0], runs[run, 1]
            for first in range(0, length, CHUNK):
                numel = min(CHUNK, length - first)
                if filled + numel > CHUNK:
                    write_codes(bits, position, filled, body, codes, t)
                    position += filled
                    filled = 0
                low, high, begin, end = filled, filled + numel, start + first, start + first + numel
                if finite:
                    form(source, begin, end, t[low:high])
                    memory, own, origin = source.residual[begin:end], keys[run], origins[run] + first
                    _put(code, Piece(low, high, memory, source.keep, own[0], own[1], origin), scale, scratch)
                else:
                    t[low:high] = 0
                    codes[low:high] = mark
                filled = -(-high // ALIGNMENT) * ALIGNMENT
                for gap in range(high, filled):
                    t[gap] = 0
                    codes[gap] = 0
    if filled:
        write_codes(bits, position, filled, body, codes, t)


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
        read_codes(bits, position, filled, body, scratch.codes, scratch.parts)
        codes = body[position : position + filled] if bits >= 8 else scratch.codes[:filled]
        _look_up(code, codes, scratch.parts, scratch)
        for piece in range(len(pieces)):
            low, high = pieces[piece, 0], pieces[piece, 1]
            base = row * payloads.scales_stride + words * pieces[piece, 2]
            scale = payloads.scales[base : base + words]
            total = t[low:high]
            if bits == 1:
                one, other = _units(code, scale)
                above, below = _value(code, np.int32(0), one, other), _value(code, np.int32(1), one, other)
                signs = body[(position + low) // 8 :]
                if row == 0:
                    put_bits(signs, above, below, total)
                else:
                    add_bits(signs, above, below, total)
                continue
            if row == 0:
                total[:] = -0.0  # to which adding a row gives that row, whichever its sign of zero
            if bits == TRITS:
                add_trits(body, position + low, scale[0], total)
            else:
                _add(code, codes[low:high], scratch.parts[low:high], scale, total)
    for piece in range(len(pieces)):
        low, high, start = pieces[piece, 0], pieces[piece, 1], pieces[piece, 3]
        source, target = t[low:high], out[start : start + high - low]
        for i in range(target.size):
            target[i] = source[i] * weight
