"""A threshold from a fitted normal distribution, brought nearer by how many exceed it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.select.criterion import Thresholds
from gradwire.codecs.select.selector import check_ratio, counts_for
from gradwire.codecs.select.thresholds import TINY
from gradwire.layout import Block, Float32Array, Float64Array

LOOKS = 2
"""How often the threshold is changed at most."""

FEWEST, MOST = 2 / 3, 4 / 3
"""Counts that are near enough, as shares of what is aimed at."""

LOWER, HIGHER = 0.5, 1.5
"""What the threshold is multiplied by where too few exceed it, and where too many do."""


@dataclass(frozen=True)
class NormalTail(Thresholds):
    """About ``ratio`` of the magnitudes: those that would exceed the threshold if values were normal, of mean 0.

    If less than two thirds do, the threshold is halved; if more than four thirds do, it is made half as long again; and
    the same once more.

    Attributes:
        ratio: Share of a segment's elements to aim at, in (0, 1].
    """

    ratio: float

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def thresholds(self, block: Block, source: Tensor, totals: Float64Array, largest: Float32Array) -> Float32Array:
        """A pass for the norm, and one whenever there is something to change; the largest is always sent."""
        norms = torch.empty(block.segment_count, dtype=torch.float32, device=source.device)
        kernels.euclidean_norms(block, source, norms)
        roots = norms.cpu().double().numpy() / np.sqrt(block.segment_numels)
        wanted = counts_for(block, self.ratio)
        thresholds = np.maximum(roots * NormalDist().inv_cdf(1 - self.ratio / 2), TINY).astype(np.float32)
        going = np.isfinite(largest)
        for _ in range(LOOKS):
            counts, _ = kernels.exceedances(block, source, np.where(going, thresholds, np.float32(np.nan)))
            few, many = going & (counts < FEWEST * wanted), going & (counts > MOST * wanted)
            going = few | many
            if not going.any():
                break
            thresholds = (thresholds * np.where(few, LOWER, np.where(many, HIGHER, 1.0))).astype(np.float32)
        return np.minimum(thresholds, largest)
