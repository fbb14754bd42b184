"""One bit a value and the mean of either side."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu._compiled import (
    Float32Array,
    Float64Array,
    UInt8Array,
    compensate,
    compiled,
    sum_of_lanes,
)
from gradwire.kernels.cpu._packed import add_bits, put_bits
from gradwire.kernels.cpu.quantise import CODES, Compiled, Piece, Scratch, Source, nothing_to_read
from gradwire.kernels.cpu.sign import write_signs
from gradwire.kernels.reference._torch import CHUNK, LANES
from gradwire.kernels.reference.onebit import OneBit


def _measure(code: OneBit, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    t, above_lanes, below_lanes = scratch.parts, scratch.lanes[0], scratch.lanes[1]
    above, below, negatives, numel = 0.0, 0.0, 0, 0
    for run in range(source.first, source.last):
        start, length = source.runs[run, 0], source.runs[run, 1]
        above_of_run, below_of_run = 0.0, 0.0
        for first in range(0, length, CHUNK):
            low, high = start + first, start + min(first + CHUNK, length)
            values = t[: high - low]
            compensate(source.gradient[low:high], source.residual[low:high], source.beta, source.gamma, values)
            negatives += _sides(values, above_lanes, below_lanes)
            above_of_run += sum_of_lanes(above_lanes)
            below_of_run += sum_of_lanes(below_lanes)
        above += above_of_run
        below += below_of_run
        numel += length
    scale[0], scale[1] = above / max(numel - negatives, 1), below / max(negatives, 1)
    return bool(np.isfinite(above + below))


@compiled
def _sides(t: Float32Array, above: Float64Array, below: Float64Array) -> int:
    """Sums either side in lanes, and returns how many values are negative."""
    above[:] = 0.0
    below[:] = 0.0
    zero = np.float32(0)
    whole = t.size // LANES * LANES
    for first in range(0, whole, LANES):
        row = t[first : first + LANES]
        for i in range(LANES):
            above[i] += np.float64(zero if row[i] < 0 else row[i])
            below[i] += np.float64(row[i] if row[i] < 0 else zero)
    for i in range(t.size - whole):
        value = t[whole + i]
        above[i] += np.float64(zero if value < 0 else value)
        below[i] += np.float64(value if value < 0 else zero)
    negatives = 0
    for i in range(t.size):
        negatives += t[i] < 0
    return negatives


def _put(code: OneBit, piece: Piece, scale: Float32Array, scratch: Scratch) -> None:
    t, memory, above, below = scratch.t[piece.low : piece.high], piece.memory, scale[0], scale[1]
    if piece.keep:
        for i in range(t.size):
            memory[i] = t[i] - (below if t[i] < 0 else above)


def _add(
    code: OneBit, low: int, high: int, position: int, scale: Float32Array, body: UInt8Array, scratch: Scratch
) -> None:
    add_bits(body[position // 8 :], scale[0], scale[1], scratch.t[low:high])


def _store(
    code: OneBit, low: int, high: int, position: int, scale: Float32Array, body: UInt8Array, scratch: Scratch
) -> None:
    put_bits(body[position // 8 :], scale[0], scale[1], scratch.t[low:high])


CODES[OneBit] = Compiled(_measure, _put, write_signs, nothing_to_read, _add, _store)
