"""Sums, maxima and counts of segments."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.reference._torch import flat_runs, formed, keep, segment_total
from gradwire.layout import Block, Float32Array, Float64Array, Int64Array


def magnitude_statistics(block: Block, source: Compensated) -> tuple[Float64Array, Float32Array]:
    """``sum |t|`` and ``max |t|`` of each segment, NaN where ``t`` is not finite; leaves ``t`` in the residual."""
    totals = np.full(block.segment_count, math.nan)
    largest = np.full(block.segment_count, math.nan, dtype=np.float32)
    for segment in range(block.segment_count):
        magnitudes, maximum, finite = [], 0.0, True
        for _, start, stop, _ in flat_runs(block, segment):
            t, kept = formed(source, start, stop)
            finite = finite and bool(t.isfinite().all())
            magnitudes.append(t.double().abs())
            maximum = max(maximum, float(t.abs().max()))
            keep(kept, t)
        if finite:
            totals[segment], largest[segment] = segment_total(magnitudes), maximum
    return totals, largest


def sign_counts(block: Block, source: Tensor) -> tuple[Int64Array, Int64Array]:
    """How many values of each segment are positive, and how many negative."""
    above, below = np.zeros(block.segment_count, dtype=np.int64), np.zeros(block.segment_count, dtype=np.int64)
    for segment in range(block.segment_count):
        for _, start, stop, _ in flat_runs(block, segment):
            above[segment] += int((source[start:stop] > 0).sum())
            below[segment] += int((source[start:stop] < 0).sum())
    return above, below


def exceedances(block: Block, source: Tensor, thresholds: Float32Array) -> tuple[Int64Array, Float64Array]:
    """How many magnitudes of ``source`` reach their segment's threshold, and their sum; 0 for a NaN threshold."""
    counts = np.zeros(block.segment_count, dtype=np.int64)
    totals = np.zeros(block.segment_count)
    for segment, threshold in enumerate(thresholds.tolist()):
        if math.isnan(threshold):
            continue
        summed = []
        for _, start, stop, _ in flat_runs(block, segment):
            magnitudes = source[start:stop].abs()
            reaching = magnitudes >= threshold
            counts[segment] += int(reaching.sum())
            summed.append(torch.where(reaching, magnitudes, 0).double())
        totals[segment] = segment_total(summed)
    return counts, totals
