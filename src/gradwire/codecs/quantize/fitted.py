"""Levels fitted to how large values are next to the norm of their segment."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from gradwire.codecs.quantize.quantiser import Quantiser
from gradwire.deferred import placed
from gradwire.kernels.reference._torch import formed
from gradwire.layout import Block, Float64Array
from gradwire.memory import Feedback

BINS = 192
"""Eight an octave, from ``2**-24`` to 1; the first one has all that is smaller."""

_SHIFT = 20
_FIRST = (0x3F800000 >> _SHIFT) - BINS
_EDGES = (np.arange(_FIRST, _FIRST + BINS + 1, dtype=np.int32) << _SHIFT).view(np.float32).astype(np.float64)
_EDGES[0] = 0.0
_LOW, _HIGH = _EDGES[:-1], _EDGES[1:]
_SWEEPS = 20
_MULTIPLIERS = 512


@dataclass(frozen=True, kw_only=True)
class Counting(Quantiser):
    """Also counts what it writes by its share of the segment's norm, each value as much as the norm's square.

    Attributes:
        counts: ``float64[BINS]``, added to; NaN where a value is not finite.
    """

    counts: Tensor

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Writes scales, which are norms, and codes."""
        source = feedback.source(gradient)
        values = [formed(source, start, stop)[0] for start, stop in block.spans]
        super().encode(block, gradient, feedback, payload, key)
        norms = payload[: 4 * block.segment_count].view(torch.float32)
        norms = norms.repeat_interleave(placed(block.segment_numels, norms.device), output_size=block.numel)
        shares = torch.cat([*values, norms[:0]]).abs_().div_(norms)
        places = (shares.view(torch.int32) >> _SHIFT).sub_(_FIRST).clamp_(0, BINS - 1)
        self.counts.index_add_(0, places, norms.double().square_())


class Magnitudes:
    """A distribution on [0, 1], uniform within bins.

    All sums are in one order, and nothing but roots and what IEEE 754 rounds is used: machines that are not alike find
    the same levels.

    Args:
        counts: ``float64[BINS]``, in any unit.
    """

    def __init__(self, counts: Float64Array) -> None:
        powers = np.stack((np.ones(BINS), (_LOW + _HIGH) / 2, (_LOW * _LOW + _LOW * _HIGH + _HIGH * _HIGH) / 3))
        self._counts = counts
        self._sums = _cumulated(counts * powers)

    def variance(self, levels: Float64Array) -> float:
        """What rounding to one of the two levels around costs, without bias: ``E (u - x) (x - l)``, in that unit."""
        return math.fsum(self._costs(levels))

    def levels(self, count: int) -> Float64Array:
        """So many levels from 0 to 1, by coordinate descent: ``F(l) = F(u') - E[x - l'; l' < x < u'] / (u' - l')``.

        Between neighbours ``l'`` and ``u'`` that is the best place; every other level moves at once. They start where
        each has as much of the root of the density.
        """
        roots = _cumulated(np.sqrt(self._counts * (_HIGH - _LOW)))
        levels = np.concatenate(([0.0], _inverse(roots, roots[-1] * (np.arange(1, count - 1) / (count - 1))), [1.0]))
        for first in (1, 2) * _SWEEPS:
            low, high = levels[first - 1 : -2 : 2], levels[first + 1 :: 2]
            beyond = self._until(high)
            mass, moment, _ = beyond - self._until(low)
            wanted = beyond[0] - (moment - low * mass) / np.maximum(high - low, _EDGES[1])
            levels[first:-1:2] = _inverse(self._sums[0], wanted).clip(low, high)
        return levels

    def powers(self, count: int) -> Float64Array:
        """So many levels: 0, and the powers of the multiplier that cost least."""
        powers = _powers(count)
        variances = [math.fsum(each) for each in self._costs(powers).tolist()]
        least: Float64Array = powers[np.argmin(variances)]
        return least

    def _costs(self, levels: Float64Array) -> Float64Array:
        """Of the variance what comes from between two levels each, which lie along the last dimension."""
        low, high = levels[..., :-1], levels[..., 1:]
        mass, first, second = np.diff(self._until(levels))
        costs: Float64Array = (low + high) * first - low * high * mass - second
        return costs

    def _until(self, x: Float64Array) -> Float64Array:
        """Integrals of 1, x and the square of x up to some places."""
        place = np.searchsorted(_HIGH, x).clip(max=BINS - 1)
        low, density = _LOW[place], self._counts[place] / (_HIGH - _LOW)[place]
        parts = np.stack((x - low, (x * x - low * low) / 2, (x * x * x - low * low * low) / 3))
        found: Float64Array = self._sums[:, place] + density * parts
        return found


@cache
def _powers(count: int) -> Float64Array:
    """Levels from 0 to 1, of each multiplier a row."""
    multipliers = np.arange(1, _MULTIPLIERS)[:, None] / _MULTIPLIERS
    powers = np.cumprod(np.repeat(multipliers, count - 2, axis=1), axis=1)
    return np.pad(powers[:, ::-1], ((0, 0), (1, 1)), constant_values=((0, 0), (0.0, 1.0)))


def _cumulated(values: Float64Array) -> Float64Array:
    """Sums up to each edge."""
    return np.cumsum(np.concatenate((np.zeros_like(values[..., :1]), values), axis=-1), axis=-1)


def _inverse(sums: Float64Array, wanted: Float64Array) -> Float64Array:
    """Where sums that rise evenly within bins are as wanted."""
    place = np.searchsorted(sums[1:], wanted).clip(max=BINS - 1)
    rise = np.diff(sums)[place]
    share = np.divide(wanted - sums[place], rise, out=np.zeros_like(wanted), where=rise > 0)
    found: Float64Array = _LOW[place] + share.clip(0, 1) * (_HIGH - _LOW)[place]
    return found
