"""One bit a value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gradwire.kernels.cpu._compiled import Float32Array
from gradwire.kernels.cpu._source import numel, total
from gradwire.kernels.cpu._stages import CODES, SIGNS, Compiled, Scratch, Source
from gradwire.kernels.reference.sign import Sign


def _measure(code: Sign, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    mean = total(source, code.norm == 2, scratch.lanes) / numel(source)
    scale[0] = math.sqrt(mean) if code.norm == 2 else mean
    return bool(np.isfinite(mean))


def value_of_sign(code: Any, number: np.int32, one: np.float32, other: np.float32) -> np.float32:
    """The scale with its sign."""
    return np.float32(-one if number else one)


CODES[Sign] = Compiled(_measure, value=value_of_sign, **SIGNS)
