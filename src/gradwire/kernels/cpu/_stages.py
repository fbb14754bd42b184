"""What a code is to the loops that encode and decode: functions of a stage, which are compiled into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

from gradwire.kernels.code import TRITS
from gradwire.kernels.cpu._compiled import INLINED, Float32Array, Float64Array, UInt8Array, hash32, inlined
from gradwire.kernels.cpu._lanes import add_chunk, add_rest, sum_of_lanes
from gradwire.kernels.cpu._packed import (
    add_bits,
    put_bits,
    read_bits,
    read_nothing,
    write_bits,
    write_signs,
    write_trits,
)
from gradwire.kernels.cpu._scratch import Packed as Packed
from gradwire.kernels.cpu._scratch import Piece as Piece
from gradwire.kernels.cpu._scratch import Scratch as Scratch
from gradwire.kernels.cpu._source import Source as Source
from gradwire.kernels.cpu._source import form
from gradwire.kernels.cpu.trits import add_trits
from gradwire.kernels.reference._torch import CHUNK, LANES


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
            one, other = terms(code, row[i])
            ones[i] += one
            others[i] += other
    for i in range(t.size - whole):
        one, other = terms(code, t[whole + i])
        ones[i] += one
        others[i] += other


def put_each(code: Any, piece: Piece, scale: Float32Array, scratch: Scratch) -> None:
    """For codes that write every value by itself."""
    t, codes = scratch.t[piece.low : piece.high], scratch.codes[piece.low : piece.high]
    memory, keep, (one, other), counter = piece.memory, piece.keep, units(code, scale), np.uint32(piece.origin)
    for i in range(t.size):
        written = number(code, t[i], one, other, hash32(piece.low_key, piece.high_key, counter))
        codes[i] = np.uint8(written)
        if keep:
            memory[i] = t[i] - value(code, written, one, other)
        counter = np.uint32(counter + np.uint32(1))


def put_signs(code: Any, piece: Piece, scale: Float32Array, scratch: Scratch) -> None:
    """For codes of one bit, which are packed from ``t`` itself."""
    t, memory, (one, other) = scratch.t[piece.low : piece.high], piece.memory, units(code, scale)
    above, below = value(code, np.int32(0), one, other), value(code, np.int32(1), one, other)
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


@inlined
def start_sum(packed: Packed, total: Float32Array) -> None:
    """Before the first payload a sum is -0, to which adding a value gives that value, whichever its sign of zero."""
    if packed.row == 0:
        total[:] = -0.0


@inlined
def add_values(code: Any, packed: Packed, codes: UInt8Array, scale: Float32Array, total: Float32Array) -> None:
    """Adds the value of each code."""
    start_sum(packed, total)
    one, other = units(code, scale)
    for i in range(total.size):
        total[i] += value(code, np.int32(codes[i]), one, other)


def add_each(
    code: Any, packed: Packed, codes: UInt8Array, parts: Float32Array, scale: Float32Array, total: Float32Array
) -> None:
    """Adds what each code stands for."""
    add_values(code, packed, codes, scale, total)


def add_parts(
    code: Any, packed: Packed, codes: UInt8Array, parts: Float32Array, scale: Float32Array, total: Float32Array
) -> None:
    """Adds parts of the scale."""
    start_sum(packed, total)
    unit = scale[0] if scale.size else np.float32(1)
    for i in range(total.size):
        total[i] += parts[i] * unit


def add_signs(
    code: Any, packed: Packed, codes: UInt8Array, parts: Float32Array, scale: Float32Array, total: Float32Array
) -> None:
    """Adds what bits choose; those of the first payload are written, which takes less time."""
    one, other = units(code, scale)
    above, below = value(code, np.int32(0), one, other), value(code, np.int32(1), one, other)
    signs = packed.body[packed.position // 8 :]
    if packed.row == 0:
        put_bits(signs, above, below, total)
    else:
        add_bits(signs, above, below, total)


def add_digits(
    code: Any, packed: Packed, codes: UInt8Array, parts: Float32Array, scale: Float32Array, total: Float32Array
) -> None:
    """Adds digits of base 3, less one and scaled."""
    start_sum(packed, total)
    add_trits(packed.body, packed.position, scale[0], total)


def add_digits_or_each(
    code: Any, packed: Packed, codes: UInt8Array, parts: Float32Array, scale: Float32Array, total: Float32Array
) -> None:
    """As the packing has it."""
    if packed.bits == TRITS:
        start_sum(packed, total)
        add_trits(packed.body, packed.position, scale[0], total)
    else:
        add_values(code, packed, codes, scale, total)


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
        add: ``(code, packed, codes, parts, scale, total)``: adds what codes, or parts, or what is packed, stand for to
            ``total``.
        write: ``(code, bits, position, count, body, codes, t)``: packs the codes of so many positions.
        read: ``(code, bits, position, count, body, codes, parts)``: unpacks them.
        terms: ``(code, t) -> (float, float)``: what :func:`sums` adds up, for codes that measure by it.
    """

    measure: Callable[..., Any]
    number: Callable[..., Any] | None = None
    value: Callable[..., Any] = no_value
    units: Callable[..., Any] = scale_itself
    put: Callable[..., Any] = put_each
    look_up: Callable[..., Any] = no_parts
    add: Callable[..., Any] = add_each
    write: Callable[..., Any] = write_bits
    read: Callable[..., Any] = read_bits
    terms: Callable[..., Any] | None = None


SIGNS: Any = {"put": put_signs, "add": add_signs, "write": write_signs, "read": read_nothing}
"""What codes of one bit have in common."""

DIGITS: Any = {"add": add_digits, "write": write_trits, "read": read_nothing}
"""What codes of three values have in common."""


CODES: dict[type, Compiled] = {}
"""The codes that are compiled, by their class."""


def _stage(name: str) -> Any:
    """Calls a code's function of this name, which is chosen by the code's class where the caller is compiled."""

    def stage(code: Any, *others: Any) -> Any: ...

    overload(stage, jit_options=INLINED, strict=False)(lambda code, *_: getattr(CODES[code.instance_class], name))
    return stage


measure, number, value, units, put, look_up, add, write, read, terms = map(_stage, Compiled._fields)
