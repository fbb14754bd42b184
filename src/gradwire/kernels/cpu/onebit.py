"""One bit a value and the mean of either side."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu._compiled import Float32Array
from gradwire.kernels.cpu._source import numel
from gradwire.kernels.cpu._stages import CODES, SIGNS, Compiled, Scratch, Source, sums
from gradwire.kernels.reference.onebit import OneBit


def _measure(code: OneBit, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    above, below, negatives = sums(code, source, scratch)
    scale[0], scale[1] = above / max(numel(source) - negatives, 1), below / max(negatives, 1)
    return bool(np.isfinite(above + below))


def _sides(code: OneBit, t: np.float32) -> tuple[np.float64, np.float64]:
    zero = np.float32(0)
    return np.float64(zero if t < 0 else t), np.float64(t if t < 0 else zero)


def _value(code: OneBit, number: np.int32, one: np.float32, other: np.float32) -> np.float32:
    return np.float32(other if number else one)


CODES[OneBit] = Compiled(_measure, value=_value, terms=_sides, **SIGNS)
