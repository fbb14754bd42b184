"""The largest magnitudes among positive and among negative values, of both sides or of one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.select.selector import Selector, check_ratio, counts_for
from gradwire.codecs.select.thresholds import HUGE
from gradwire.errors import ConfigurationError
from gradwire.layout import Block, Float32Array, Float64Array, Int64Array
from gradwire.memory import Feedback

MOST_OF_ONE_SIDE = 0.5
"""As a share of all: k largest values and k smallest that are not the same."""


@dataclass(frozen=True)
class EitherSide(Selector):
    """The same share of the positive and of the negative values of each segment, the largest of each side.

    Together they are as many as the ratio asks for; where there are fewer that are not zero, zeros make up the number.
    A side that has any sends at least one, else the few of a rare sign would never go; a single one is the largest.

    Attributes:
        ratio: The share, in (0, 1].
    """

    ratio: float

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def counts(self, block: Block) -> Int64Array:
        """``ratio`` of each segment."""
        return counts_for(block, self.ratio)

    def select(
        self, block: Block, gradient: Tensor, feedback: Feedback, counts: Int64Array, positions: Tensor, values: Tensor
    ) -> None:
        """The largest magnitudes of both sides together, twice as many; they hold each side's own, or nearly always."""
        doubled = np.minimum(np.where(counts > 1, 2 * counts, counts), block.segment_numels)
        candidates = torch.empty(int(doubled.sum()), dtype=torch.int64, device=gradient.device)
        found = torch.empty(candidates.shape, dtype=torch.float32, device=gradient.device)
        kernels.topk_select(block, feedback.source(gradient), doubled, candidates, found)
        among = Block.dense("candidates", doubled)
        whole = torch.from_numpy(np.repeat(np.isfinite(_largest(among, found)), counts)).to(gradient.device)
        source = feedback.buffer(gradient)
        above, below = kernels.sign_counts(among, found)
        positive, negative, zeros = _split(counts, *kernels.sign_counts(block, source), above)
        if (above >= positive).all() and (below >= negative).all() and not zeros.any():
            padding = torch.from_numpy(np.repeat(among.runs[:, 2] - among.runs[:, 0], counts)).to(gradient.device)
            chosen = _of_sides(among, found, positive, negative, zeros) - padding
            torch.index_select(candidates, 0, chosen, out=positions)
            torch.index_select(found, 0, chosen, out=values)
        else:
            positions.copy_(_of_sides(block, source.nan_to_num(0.0), positive, negative, zeros))
            kernels.gather(block, source, positions, values)
        values.masked_fill_(~whole, torch.nan)


@dataclass(frozen=True)
class OneSide(Selector):
    """The k largest values of each segment, or the k smallest, whichever have the larger mean magnitude.

    Where there are not k of that sign, zeros make up the number, then the smallest magnitudes of the other sign.

    Attributes:
        ratio: k as a share of a segment's elements, in (0, 0.5]: beyond, both sides may be all there is.
    """

    ratio: float

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= MOST_OF_ONE_SIDE:
            raise ConfigurationError(
                f"ratio={self.ratio!r} is out of range; choose 0 < ratio <= {MOST_OF_ONE_SIDE}, as the largest and the "
                "smallest values are not to be the same, for example 0.01 for 1 %"
            )

    def counts(self, block: Block) -> Int64Array:
        """``ratio`` of each segment."""
        return counts_for(block, self.ratio)

    def select(
        self, block: Block, gradient: Tensor, feedback: Feedback, counts: Int64Array, positions: Tensor, values: Tensor
    ) -> None:
        """The largest magnitudes, three times as many; they hold k of either side, or nearly always."""
        tripled = np.minimum(3 * counts, block.segment_numels)
        candidates = torch.empty(int(tripled.sum()), dtype=torch.int64, device=gradient.device)
        found = torch.empty(candidates.shape, dtype=torch.float32, device=gradient.device)
        kernels.topk_select(block, feedback.source(gradient), tripled, candidates, found)
        among = Block.dense("candidates", tripled)
        whole = torch.from_numpy(np.repeat(np.isfinite(_largest(among, found)), counts)).to(gradient.device)
        if all((side >= counts).all() for side in kernels.sign_counts(among, found)):
            chosen = _of_larger_side(among, found, counts)
            padding = torch.from_numpy(np.repeat(among.runs[:, 2] - among.runs[:, 0], counts)).to(gradient.device)
            torch.index_select(candidates, 0, chosen - padding, out=positions)
        else:
            positions.copy_(_of_larger_side(block, feedback.buffer(gradient).nan_to_num(0.0), counts))
        kernels.gather(block, feedback.buffer(gradient), positions, values)
        values.masked_fill_(~whole, torch.nan)


def _of_larger_side(block: Block, source: Tensor, counts: Int64Array) -> Tensor:
    """Positions of the largest or of the smallest values of each segment."""
    sides, totals = [], []
    for side in (source, -source):
        sides.append(_of_largest(block, side, counts))
        values = torch.empty(sides[-1].shape, dtype=torch.float32, device=source.device)
        kernels.gather(block, side, sides[-1], values)
        totals.append(_sums(Block.dense("side", counts), values))
    above = torch.from_numpy(np.repeat(totals[0] >= totals[1], counts)).to(source.device)
    return torch.where(above, sides[0], sides[1])


def _of_largest(block: Block, source: Tensor, counts: Int64Array) -> Tensor:
    """Positions of the largest values: positive ones, then zeros, then the negative ones that are nearest to 0."""
    above, below = kernels.sign_counts(block, source)
    positive = np.minimum(counts, above)
    zeros = np.minimum(counts - positive, block.segment_numels - above - below)
    nearest = torch.where(source < 0, source.reciprocal().clamp(min=-HUGE), source)
    return _of_sides(block, nearest, positive, counts - positive - zeros, zeros)


def _sums(block: Block, values: Tensor) -> Float64Array:
    """Of the values of each segment, with their signs."""
    above, below = (
        kernels.magnitude_statistics(block, kernels.Compensated(side))[0]
        for side in (values.clamp(min=0), values.clamp(max=0))
    )
    sums: Float64Array = above - below
    return sums


def _largest(block: Block, values: Tensor) -> Float32Array:
    """NaN in segments that have a value that is not finite."""
    return kernels.magnitude_statistics(block, kernels.Compensated(values))[1]


def _of_sides(block: Block, source: Tensor, positive: Int64Array, negative: Int64Array, zeros: Int64Array) -> Tensor:
    """Positions of the largest positive and negative values, and of zeros, from copies that hold these alone."""
    sides = [(source.clamp(min=0), positive), ((-source).clamp_(min=0), negative)]
    if zeros.any():
        sides.append(((source == 0).float(), zeros))
    return torch.cat([_top(block, side, wanted) for side, wanted in sides]).sort().values


def _split(
    counts: Int64Array, above: Int64Array, below: Int64Array, leading: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """How many positive, negative and zero values to choose of each segment, where one is alone as ``leading`` says."""
    either = above + below
    wanted = np.minimum(counts, either)
    positive = np.rint(wanted * (above / np.maximum(either, 1))).astype(np.int64)
    some_above, some_below = (np.minimum(side, wanted > 1) for side in (above, below))
    positive = np.clip(positive, np.maximum(wanted - below, some_above), np.minimum(above, wanted - some_below))
    positive = np.where(counts == 1, np.minimum(leading, wanted), positive)
    return positive, wanted - positive, counts - wanted


def _top(block: Block, side: Tensor, counts: Int64Array) -> Tensor:
    positions = torch.empty(int(counts.sum()), dtype=torch.int64, device=side.device)
    values = torch.empty(positions.shape, dtype=torch.float32, device=side.device)
    kernels.topk_select(block, kernels.Compensated(side), counts, positions, values)
    return positions
