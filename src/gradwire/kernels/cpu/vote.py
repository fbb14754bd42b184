"""Signs without a scale."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import (
    INFINITE,
    Float32Array,
    UInt8Array,
    add_compensated,
    array,
    compensate,
    compensation,
    compiled,
    hash32,
    largest_of_runs,
)
from gradwire.kernels.cpu.sign import pack_signs
from gradwire.kernels.reference._torch import CHUNK
from gradwire.layout import Block, Int64Array, UInt64Array
from gradwire.randomness import run_keys


def vote_encode(
    block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float, payload: Tensor, key: int
) -> None:
    """See :meth:`gradwire.kernels.Kernels.vote_encode`."""
    head = 4 * block.segment_count
    packed = array(payload)
    _encode(
        block.runs,
        block.segments,
        block.origins,
        run_keys(key, block.streams),
        *compensation(gradient, residual, beta, gamma),
        packed[:head].view(np.float32),
        packed[head:],
    )


@compiled
def _encode(
    runs: Int64Array,
    segments: Int64Array,
    origins: Int64Array,
    keys: UInt64Array,
    gradient: Float32Array,
    residual: Float32Array,
    keep: bool,
    beta: np.float32,
    gamma: np.float32,
    scales: Float32Array,
    packed: UInt8Array,
) -> None:
    t, sent = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    packed[:] = 0
    for segment in range(scales.size):
        first_run, last_run = segments[segment], segments[segment + 1]
        if largest_of_runs(runs[first_run:last_run], gradient, residual, beta, gamma) >= INFINITE:
            scales[segment] = np.nan
            if keep:
                add_compensated(runs[first_run:last_run], gradient, residual, beta, gamma)
            continue
        scales[segment] = 1
        for run in range(first_run, last_run):
            start, length, position = runs[run]
            low_key = np.uint32(keys[run] & np.uint64(0xFFFFFFFF))
            high_key = np.uint32(keys[run] >> np.uint64(32))
            for first in range(0, length, CHUNK):
                low, high = start + first, start + min(first + CHUNK, length)
                memory, values = residual[low:high], t[: high - low]
                compensate(gradient[low:high], memory, beta, gamma, values)
                _vote(values, low_key, high_key, origins[run] + first, sent)
                pack_signs(sent, high - low, packed[(position + first) // 8 :])
                if keep:
                    for i in range(values.size):
                        memory[i] = values[i] - sent[i]


@compiled
def _vote(t: Float32Array, low_key: np.uint32, high_key: np.uint32, origin: int, sent: Float32Array) -> None:
    """Writes 1 or -1 for each value."""
    zeros = 0
    for i in range(t.size):
        sent[i] = np.float32(-1) if t[i] < 0 else np.float32(1)
        zeros += t[i] == 0
    if zeros:
        counter = np.uint32(origin)
        for i in range(t.size):
            minus = hash32(low_key, high_key, counter) >> np.uint32(31)
            if t[i] == 0:
                sent[i] = np.float32(1) - np.float32(minus) * np.float32(2)
            counter = np.uint32(counter + np.uint32(1))
