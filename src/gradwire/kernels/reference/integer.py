"""Levels of a scale that all workers share, so that codes add up."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.code import Draws, Layout
from gradwire.kernels.compensated import Compensated
from gradwire.kernels.reference._torch import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    keep_all,
    largest,
    pieces_of,
    write_mean,
)
from gradwire.kernels.reference.qsgd import check_bits, norm_of, uniform16
from gradwire.kernels.reference.quantise import put_all, read_all
from gradwire.layout import Block


class Integers(NamedTuple):
    """QSGD's levels against a scale that all workers have: a code is written by one, and the sum of all is read.

    Attributes:
        bits: Bits a value: 2, 4 or 8.
        levels: s, levels on either side of zero, with ``2 * s * workers < 2**bits``.
        workers: How many codes are added up.
    """

    bits: int
    levels: int
    workers: int

    def check(self) -> None:
        """Knows how to pack codes of 2, 4 or 8 bits."""
        check_bits(self.bits)

    @property
    def layout(self) -> Layout:
        """``bits`` a position; scales travel apart."""
        return Layout(1, self.bits)

    def measure(self, values: list[Tensor]) -> Tensor | None:
        """The largest magnitude."""
        peak = largest(values)
        return None if math.isnan(peak) else values[0].new_tensor([peak])

    def put(self, t: Tensor, scale: Tensor, draws: Draws) -> Tensor:
        """A level of either sign, plus s; the last one for what is beyond the scale."""
        clamped = scale.clamp(max=LARGEST_SCALE)
        inverse = torch.full_like(scale, self.levels) / clamped if scale >= SMALLEST_SCALE else torch.zeros_like(scale)
        return (t * inverse + (uniform16(draws()) + self.levels)).to(torch.int32).clamp(0, 2 * self.levels)

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """What sums of codes stand for, divided by the number of workers."""
        zero = self.levels * self.workers
        scale = scales[:, 0]
        step = scale.clamp(max=LARGEST_SCALE) / torch.full_like(scale, self.levels)
        step = torch.where(scale >= SMALLEST_SCALE, step, 0).masked_fill(~scale.isfinite(), torch.nan)
        return (codes.clamp(max=2 * zero) - zero).float() * (step * torch.tensor(1 / self.workers, dtype=torch.float32))


def integer_scales(code: Integers, block: Block, source: Compensated, scales: Tensor) -> None:
    """The largest ``|t|`` of each segment, infinity where any ``t`` is not finite; leaves ``t`` in the residual."""
    for segment in range(block.segment_count):
        pieces = pieces_of(block, segment, source)
        scale = code.measure([piece.t for piece in pieces])
        scales[segment] = torch.inf if scale is None else scale
        keep_all(pieces)


def integer_encode(
    code: Integers, block: Block, values: Tensor, subtract: bool, scales: Tensor, codes: Tensor, key: int
) -> None:
    """Writes values against the largest scales of all workers; with ``subtract`` takes what is sent from them."""
    source = Compensated(values, values if subtract else None, 0.0, 1.0)
    codes.copy_(put_all(code._replace(workers=1), block, source, key, scales[:, None].unbind()))


def integer_decode(code: Integers, block: Block, scales: Tensor, codes: Tensor, out: Tensor) -> None:
    """``out`` = what codes added up over all workers stand for, divided by their number."""
    write_mean(block, read_all(code, block, scales, codes)[None], out, 1.0)


def euclidean_norms(block: Block, values: Tensor, norms: Tensor) -> None:
    """``float32[S]``, the norm of each segment: 0 if too small to divide by, NaN where a value is not finite."""
    source = Compensated(values, None, 0.0, 1.0)
    for segment in range(block.segment_count):
        norm = norm_of([piece.t for piece in pieces_of(block, segment, source)])
        norms[segment] = torch.nan if norm is None else norm
