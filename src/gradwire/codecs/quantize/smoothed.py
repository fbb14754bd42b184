"""Every value in a few bits, after a transform that spreads outliers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.quantize.quantiser import Quantiser
from gradwire.deferred import placed
from gradwire.kernels.reference._torch import formed, keep
from gradwire.kernels.reference.rotation import LARGEST, PLAIN
from gradwire.layout import Block, Int64Array
from gradwire.memory import NONE, Feedback

REST = 8.0
"""What the last values of a run that fill no transform are divided by: about as much as a transform shortens others."""


@dataclass(frozen=True)
class Smoothed(Quantiser):
    """The Hadamard transform of every 32 values of a run, divided by 32, written by a code.

    The transform has no random signs, so it is the same for all, and sums of payloads are transformed back once.
    """

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Writes scales and codes of the transform."""
        source, values = feedback.source(gradient), torch.empty_like(gradient)
        for start, stop in block.spans:
            values[start:stop] = formed(source, start, stop)[0]
        _transform(block, values, 1.0, 1 / REST)
        super().encode(block, values, NONE, payload, key)
        if source.residual is not None:
            self.decode(block, payload[None], values, 1.0)
            for start, stop in block.spans:
                (t, memory), sent = formed(source, start, stop), values[start:stop]
                keep(memory, torch.where(sent.isfinite(), t - sent, t))

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums what codes stand for, and transforms it back; what overflows becomes the largest finite values."""
        super().decode(block, payloads, out, weight)
        _transform(block, out, PLAIN, REST)
        for part in block.parts(out):
            part.clamp_(-LARGEST, LARGEST)


def _transform(block: Block, values: Tensor, factor: float, rest_factor: float) -> None:
    """In place, and what fills no transform is only multiplied."""
    starts, rest = _places(block)
    kernels.hadamard(starts, values, factor)
    if len(rest):
        values[placed(rest, values.device)] *= rest_factor


@lru_cache(maxsize=4096)
def _places(block: Block) -> tuple[Int64Array, Int64Array]:
    """Where transforms begin, and which elements are in none."""
    start, length, _ = block.runs.T
    whole = length // PLAIN
    return _counted(start, whole, PLAIN), _counted(start + whole * PLAIN, length % PLAIN, 1)


def _counted(first: Int64Array, counts: Int64Array, step: int) -> Int64Array:
    """Of each run so many numbers, from its first one on."""
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    found: Int64Array = np.repeat(first, counts) + number * step
    return found
