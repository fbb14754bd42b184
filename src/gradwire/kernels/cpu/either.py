"""One bit a value, which chooses one of two values of its segment: the decoder of signs and of two means."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu._compiled import Float32Array, UInt8Array, add_either, compiled, put_either
from gradwire.kernels.reference._torch import CHUNK
from gradwire.layout import Int64Array


@compiled
def sum_either(
    runs: Int64Array,
    segments: Int64Array,
    payloads: UInt8Array,
    stride: int,
    head: int,
    if_clear: Float32Array,
    if_set: Float32Array,
    out: Float32Array,
    weight: np.float32,
) -> None:
    """``out = weight *`` the sum over payloads, which lie ``stride`` bytes apart with ``head`` bytes before the bits.

    ``if_clear[row, segment]`` and ``if_set[row, segment]`` are what bits stand for.
    """
    rows = len(if_clear)
    total = np.empty(CHUNK, np.float32)
    for segment in range(segments.size - 1):
        for run in range(segments[segment], segments[segment + 1]):
            start, length, position = runs[run]
            for first in range(0, length, CHUNK):
                count = min(CHUNK, length - first)
                bytes_of_chunk = (count + 7) // 8
                for row in range(rows):
                    base = row * stride + head + (position + first) // 8
                    packed = payloads[base : base + bytes_of_chunk]
                    clear, set_ = if_clear[row, segment], if_set[row, segment]
                    if row == 0:
                        for byte in range(bytes_of_chunk):
                            put_either(total, 8 * byte, packed[byte], set_, clear)
                    else:
                        for byte in range(bytes_of_chunk):
                            add_either(total, 8 * byte, packed[byte], set_, clear)
                piece = out[start + first : start + first + count]
                for i in range(count):
                    piece[i] = total[i] * weight
