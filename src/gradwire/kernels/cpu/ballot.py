"""Whole votes."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu._compiled import INFINITE, Float32Array
from gradwire.kernels.cpu._packed import write_trits_or_bits
from gradwire.kernels.cpu._source import numel, peak
from gradwire.kernels.cpu._stages import CODES, Compiled, Scratch, Source, add_digits_or_each, sums
from gradwire.kernels.cpu.qsgd import value_of_level
from gradwire.kernels.reference._torch import LARGEST_SCALE, SMALLEST_SCALE
from gradwire.kernels.reference.ballot import Ballot


def _measure(code: Ballot, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    scale[0], scale[1] = 1, 0
    if not code.signs:
        total, _, _ = sums(code, source, scratch)
        step = 2 * (total / numel(source)) / ((1 << (code.bits - 1)) - 1)
        scale[1] = min(step, LARGEST_SCALE) if step >= SMALLEST_SCALE else 0.0
    return bool(peak(source) < INFINITE)


def _magnitude(code: Ballot, t: np.float32) -> tuple[np.float64, np.float64]:
    return np.float64(abs(t)), np.float64(0)


def _units(code: Ballot, scale: Float32Array) -> tuple[np.float32, np.float32]:
    """Votes in 1, and what one counts."""
    return np.float32(np.float32(1) / scale[1]) if scale[1] > 0 else np.float32(0), scale[0]


def _number(code: Ballot, t: np.float32, one: np.float32, other: np.float32, random: np.uint32) -> np.int32:
    levels = np.int32((1 << (code.bits - 1)) - 1)
    middle, highest = np.float32(levels + 0.5), np.float32(2 * levels)
    steps = np.int32(min(abs(t) * one + middle, highest))
    vote = np.int32(2 * levels) - steps if t < 0 else steps
    return np.int32(levels + np.int32(t > 0) - np.int32(t < 0)) if code.signs else np.int32(vote)


def _value(code: Ballot, number: np.int32, one: np.float32, other: np.float32) -> np.float32:
    return np.float32(value_of_level(number, np.int32((1 << (code.bits - 1)) - 1), other))


CODES[Ballot] = Compiled(
    _measure, _number, _value, _units, add=add_digits_or_each, write=write_trits_or_bits, terms=_magnitude
)
