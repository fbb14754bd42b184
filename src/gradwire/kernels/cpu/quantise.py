"""Encodes and decodes a block segment by segment, whatever the code: the only loops over segments, runs and chunks.

A code's class chooses what it measures of a segment, how it writes a chunk, and how it adds one up again. Numba
compiles the loops for each class and keeps them on the disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from numba.extending import overload
from torch import Tensor

from gradwire.kernels.code import Code
from gradwire.kernels.compensated import Compensated
from gradwire.kernels.cpu._compiled import (
    INLINED,
    Float32Array,
    Float64Array,
    UInt8Array,
    UInt32Array,
    array,
    compiled,
    inlined,
    rows_of_bytes,
    sum_of_lanes,
)
from gradwire.kernels.cpu._packed import pack, unpack
from gradwire.kernels.cpu._source import Source as Source
from gradwire.kernels.cpu._source import form, of_segment, settle_all, source_of
from gradwire.kernels.reference._torch import CHUNK, LANES
from gradwire.layout import ALIGNMENT, Block, Int64Array, UInt64Array
from gradwire.randomness import run_keys


class Piece(NamedTuple):
    """Consecutive values of a run, in a chunk of several if they are few.

    Attributes:
        low: Where they begin in the scratch,
        high: and end.
        memory: Their residual.
        keep: Whether there is one, for what is not sent.
        key: Their run's random numbers,
        origin: and the number of the first one.
    """

    low: int
    high: int
    memory: Float32Array
    keep: bool
    key: np.uint64
    origin: int


class Scratch(NamedTuple):
    """Room for a chunk.

    Attributes:
        t: ``float32[CHUNK]``: compensated values, or sums of what they were sent as; 0 in gaps.
        parts: ``float32[CHUNK]`` and
        words: ``uint32[CHUNK]``, for a code's own use.
        codes: ``uint8[CHUNK]``: what is packed; 0 in gaps.
        lanes: ``float64[2, LANES]``, for sums.
    """

    t: Float32Array
    parts: Float32Array
    words: UInt32Array
    codes: UInt8Array
    lanes: Float64Array


class Payloads(NamedTuple):
    """What is summed: numbers of segments and bodies, of which those of a row lie apart from those of the next.

    Attributes:
        scales: The numbers, ``scales_stride`` apart.
        scales_stride: 0 for those that all rows have in common.
        bodies: The bodies, ``stride`` bytes apart.
        stride: See ``bodies``.
        size: Bytes of a body.
        rows: How many there are.
        words: Numbers of a segment.
    """

    scales: Float32Array
    scales_stride: int
    bodies: UInt8Array
    stride: int
    size: int
    rows: int
    words: int


class Compiled(NamedTuple):
    """What a code is to the loops.

    Attributes:
        measure: ``(code, source, scale, scratch) -> bool``: fills ``scale`` for a segment; False if a value is not
            finite.
        put: ``(code, piece, scale, scratch)``: writes ``t`` to ``codes``, and leaves in the memory what is not sent.
        pack: ``(code, position, count, body, scratch)``: writes ``codes`` of so many positions, or signs of ``t``.
        read: ``(code, position, count, body, scratch)``: reads them, to where ``add`` wants them.
        add: ``(code, low, high, position, scale, body, scratch)``: adds what some positions stand for to ``t``.
        store: As ``add``, of the first row; without it that is added to -0.0, which makes it that row, whichever its
            sign of zero.
        terms: ``(code, t) -> (float, float)``: what :func:`sums` adds up, for codes that measure by it.
    """

    measure: Callable[..., Any]
    put: Callable[..., Any]
    pack: Callable[..., Any]
    read: Callable[..., Any]
    add: Callable[..., Any]
    store: Callable[..., Any] | None = None
    terms: Callable[..., Any] | None = None


CODES: dict[type, Compiled] = {}
"""The codes that are compiled, by their class."""


def encode(code: Code, block: Block, source: Compensated, payload: Tensor, key: int) -> None:
    words, size, _ = code.layout(block.positions)
    packed, head = array(payload), 4 * words * block.segment_count
    packed[head:] = 0
    put_all(code, block, source_of(block, source), packed[:head].view(np.float32), packed[head : head + size], key)


def decode(code: Code, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
    words, size, _ = code.layout(block.positions)
    packed, stride = rows_of_bytes(payloads)
    head, scales = 4 * words * block.segment_count, packed.view(np.float32)
    rows = Payloads(scales, stride // 4, packed[head:], stride, size, len(payloads), words)
    read_all(code, block, rows, out, weight)


def put_all(code: Code, block: Block, source: Source, scales: Float32Array, body: UInt8Array, key: int) -> None:
    """Writes a body of zeros, and the scales unless they are agreed."""
    (words, _, mark), keys = code.layout(0), run_keys(key, block.streams)
    _encode(code, words, mark, source, block.origins, keys, scales, body, _scratch())


def read_all(code: Code, block: Block, payloads: Payloads, out: Tensor, weight: float) -> None:
    """Writes the weighted sum of payloads."""
    pieces = np.empty((CHUNK // ALIGNMENT, 5), np.int64)
    _decode(code, block.runs, block.segments, payloads, array(out), np.float32(weight), pieces, _scratch())


@inlined
def sums(code: Any, source: Source, scratch: Scratch) -> tuple[float, float, int]:
    """Sums of the two terms of all values, in the order the reference defines, and how many values are negative."""
    t, ones, others = scratch.parts, scratch.lanes[0], scratch.lanes[1]
    first, second, negatives = 0.0, 0.0, 0
    for run in range(len(source.runs)):
        start, stop = source.runs[run, 0], source.runs[run, 0] + source.runs[run, 1]
        first_of_run, second_of_run = 0.0, 0.0
        for low in range(start, stop, CHUNK):
            high = min(low + CHUNK, stop)
            form(source, low, high, t)
            _add_terms(code, t[: high - low], ones, others)
            first_of_run += sum_of_lanes(ones)
            second_of_run += sum_of_lanes(others)
            for i in range(high - low):
                negatives += t[i] < 0
        first += first_of_run
        second += second_of_run
    return first, second, negatives


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


@inlined
def add_parts(parts: Float32Array, unit: np.float32, total: Float32Array) -> None:
    """``total += parts * unit``."""
    for i in range(total.size):
        total[i] += parts[i] * unit


@inlined
def leave_parts(t: Float32Array, parts: Float32Array, unit: np.float32, memory: Float32Array) -> None:
    """Leaves in the memory what parts of the scale do not stand for."""
    for i in range(t.size):
        memory[i] = t[i] - parts[i] * unit


def pack_codes(code: Any, position: int, count: int, body: UInt8Array, scratch: Scratch) -> None:
    """Packs codes of ``code.bits``."""
    pack(scratch.codes, count, code.bits, body[position * code.bits // 8 :])


def unpack_codes(code: Any, position: int, count: int, body: UInt8Array, scratch: Scratch) -> None:
    """Unpacks codes of ``code.bits``."""
    begin = position * code.bits // 8
    unpack(body[begin : begin + count * code.bits // 8], code.bits, scratch.codes)


def add_scaled(
    code: Any, low: int, high: int, position: int, scale: Float32Array, body: UInt8Array, scratch: Scratch
) -> None:
    """For codes that read parts of a scale."""
    add_parts(scratch.parts[low:high], scale[0], scratch.t[low:high])


def nothing_to_read(code: Any, position: int, count: int, body: UInt8Array, scratch: Scratch) -> None:
    """For codes that add up what is packed."""


def _measure(code: Any, source: Source, scale: Float32Array, scratch: Scratch) -> Any: ...


def _put(code: Any, piece: Piece, scale: Float32Array, scratch: Scratch) -> Any: ...


def _pack(code: Any, position: int, count: int, body: UInt8Array, scratch: Scratch) -> Any: ...


def _read(code: Any, position: int, count: int, body: UInt8Array, scratch: Scratch) -> Any: ...


def _add(
    code: Any, low: int, high: int, position: int, scale: Float32Array, body: UInt8Array, scratch: Scratch
) -> Any: ...


def _store(
    code: Any, low: int, high: int, position: int, scale: Float32Array, body: UInt8Array, scratch: Scratch
) -> Any: ...


def _clear_and_add(
    code: Any, low: int, high: int, position: int, scale: Float32Array, body: UInt8Array, scratch: Scratch
) -> None:
    scratch.t[low:high] = -0.0
    _add(code, low, high, position, scale, body, scratch)


def _terms(code: Any, t: np.float32) -> Any: ...


def _choosing(number: int) -> Callable[..., Any]:
    """Finds a stage's function by the class of the code."""
    return lambda code, *others: CODES[code.instance_class][number] or _clear_and_add


for _number, _stage in enumerate((_measure, _put, _pack, _read, _add, _store, _terms)):
    overload(cast(Any, _stage), jit_options=INLINED, strict=False)(_choosing(_number))


def _scratch() -> Scratch:
    t, parts, words = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32), np.empty(CHUNK, np.uint32)
    return Scratch(t, parts, words, np.empty(CHUNK, np.uint8), np.empty((2, LANES), np.float64))


@compiled
def _encode(
    code: Any,
    words: int,
    mark: int,
    source: Source,
    origins: Int64Array,
    keys: UInt64Array,
    scales: Float32Array,
    body: UInt8Array,
    scratch: Scratch,
) -> None:
    filled, position = 0, 0
    runs, segments, t, codes = source.runs, source.segments, scratch.t, scratch.codes
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
                    _pack(code, position, filled, body, scratch)
                    position += filled
                    filled = 0
                low, high, begin, end = filled, filled + numel, start + first, start + first + numel
                if finite:
                    form(source, begin, end, t[low:high])
                    piece = Piece(low, high, source.residual[begin:end], source.keep, keys[run], origins[run] + first)
                    _put(code, piece, scale, scratch)
                else:
                    t[low:high] = 0
                    codes[low:high] = mark
                filled = -(-high // ALIGNMENT) * ALIGNMENT
                for gap in range(high, filled):
                    t[gap] = 0
                    codes[gap] = 0
    if filled:
        _pack(code, position, filled, body, scratch)


@compiled
def _decode(
    code: Any,
    runs: Int64Array,
    segments: Int64Array,
    payloads: Payloads,
    out: Float32Array,
    weight: np.float32,
    pieces: Int64Array,
    scratch: Scratch,
) -> None:
    count, filled, position = 0, 0, 0
    for segment in range(segments.size - 1):
        for run in range(segments[segment], segments[segment + 1]):
            start, length = runs[run, 0], runs[run, 1]
            for first in range(0, length, CHUNK):
                numel = min(CHUNK, length - first)
                if filled + numel > CHUNK:
                    _sum(code, pieces[:count], payloads, out, weight, scratch)
                    position += filled
                    count = filled = 0
                piece = pieces[count]
                piece[0], piece[1], piece[2], piece[3] = filled, filled + numel, segment, start + first
                piece[4] = position
                count += 1
                filled = -(-(filled + numel) // ALIGNMENT) * ALIGNMENT
    if count:
        _sum(code, pieces[:count], payloads, out, weight, scratch)


@compiled
def _sum(
    code: Any,
    pieces: Int64Array,
    payloads: Payloads,
    out: Float32Array,
    weight: np.float32,
    scratch: Scratch,
) -> None:
    """Sums the pieces of a chunk: where each begins and ends in it, its segment, where it goes to, and what precedes.

    That is the number of positions before the chunk, the same for all of them.
    """
    words, position, filled = payloads.words, pieces[0, 4], -(-pieces[-1, 1] // ALIGNMENT) * ALIGNMENT
    for row in range(payloads.rows):
        body = payloads.bodies[row * payloads.stride : row * payloads.stride + payloads.size]
        _read(code, position, filled, body, scratch)
        for piece in range(len(pieces)):
            low, high = pieces[piece, 0], pieces[piece, 1]
            base = row * payloads.scales_stride + words * pieces[piece, 2]
            scale = payloads.scales[base : base + words]
            if row == 0:
                _store(code, low, high, position + low, scale, body, scratch)
            else:
                _add(code, low, high, position + low, scale, body, scratch)
    for piece in range(len(pieces)):
        low, high, start = pieces[piece, 0], pieces[piece, 1], pieces[piece, 3]
        source, target = scratch.t[low:high], out[start : start + high - low]
        for i in range(target.size):
            target[i] = source[i] * weight
