"""What the loops of quantisers work on: a chunk, the pieces of runs in it, and what it is summed from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gradwire.kernels.cpu._compiled import Float32Array, Float64Array, UInt8Array, UInt32Array
from gradwire.kernels.reference._torch import CHUNK, LANES


class Piece(NamedTuple):
    """Consecutive values of a run, in a chunk of several if they are few.

    Attributes:
        low: Where they begin in the scratch,
        high: and end.
        memory: Their residual.
        keep: Whether there is one, for what is not sent.
        low_key: Their run's random numbers,
        high_key: in two halves,
        origin: and the number of the first one.
    """

    low: int
    high: int
    memory: Float32Array
    keep: bool
    low_key: np.uint32
    high_key: np.uint32
    origin: int


class Packed(NamedTuple):
    """Where the codes of a piece lie in a payload.

    Attributes:
        bits: Of each, as a layout has it.
        row: Which payload it is.
        body: Its bytes.
        position: The first one's.
    """

    bits: int
    row: int
    body: UInt8Array
    position: int


class Scratch(NamedTuple):
    """Room for a chunk.

    Attributes:
        t: ``float32[CHUNK]``: compensated values, or sums of what they were sent as; 0 in gaps.
        parts: ``float32[CHUNK]`` and
        words: ``uint32[CHUNK]``, for a code's own use.
        codes: ``uint8[CHUNK]``: what is packed; 0 in gaps.
        lanes: ``float64[4, LANES]``, for two sums of a chunk, and of chunks.
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


def new_scratch() -> Scratch:
    """For one thread."""
    t, parts, words = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32), np.empty(CHUNK, np.uint32)
    return Scratch(t, parts, words, np.empty(CHUNK, np.uint8), np.empty((4, LANES), np.float64))
