"""Coordinates that every rank draws alike, so that values all-reduce and no index travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.codec import Decode, LinearCodec
from gradwire.codecs.select.selector import check_ratio, counts_for
from gradwire.deferred import known, placed
from gradwire.layout import Block
from gradwire.memory import Feedback


@dataclass(frozen=True)
class SharedRandom(LinearCodec):
    """k coordinates of each segment, uniform without replacement, from randomness that all ranks share.

    Without a memory, or with one that asks for it, values are scaled by d / k, which makes them unbiased; with error
    feedback they are sent as they are, and what was not chosen waits.

    Attributes:
        ratio: k as a share of the segment's elements, in (0, 1].
    """

    selects: ClassVar[bool] = True

    ratio: float

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, key: int) -> tuple[Tensor, Decode]:
        """Gathers the chosen values; decoding scatters their mean and leaves zero elsewhere."""
        values, finite = feedback.compensate(block, gradient)
        counts = counts_for(block, self.ratio)
        positions = torch.empty(int(counts.sum()), dtype=torch.int64, device=gradient.device)
        kernels.randomk_positions(block, counts, positions, key)
        code = torch.empty(positions.shape, dtype=torch.float32, device=gradient.device)
        kernels.gather(block, values, positions, code)

        def decode(mean: Tensor, out: Tensor) -> None:
            kernels.scatter_sum(block, positions[None], mean[None], out, 1.0)

        if not known(finite):
            code.masked_fill_(~finite, torch.nan)
        chosen = code if feedback.residual is None else code.clone()
        if feedback.residual is None or feedback.unbiased:
            scales = np.repeat((block.segment_numels / counts).astype(np.float32), counts)
            code.mul_(placed(scales, code.device))
        feedback.leave(block, positions, chosen, code)
        return code, decode
