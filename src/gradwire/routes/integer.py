"""Integers of a scale that all workers share: they add up on the way, so they all-reduce."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.deferred import expect
from gradwire.errors import ConfigurationError, PayloadError
from gradwire.kernels.codes import Integers
from gradwire.kernels.reference.terngrad import SMALLEST_VARIANCE
from gradwire.layout import Block
from gradwire.memory import Feedback
from gradwire.wire.requests import AllReduceMax, AllReduceSum, Synchronization


@dataclass(frozen=True)
class SharedLevels:
    """Stochastic levels between zero and the largest magnitude that any worker has in a segment.

    A code of b bits is a level plus s, so n codes add up to at most ``2 s n``, which has to stay below ``2**b``.
    TernGrad's shared scaler is ``SharedLevels(bits, levels=1)``.

    Attributes:
        bits: Bits a value: 2, 4 or 8.
        levels: s, levels on each side of zero; None for as many as fit.
        clip: Standard deviations to which a worker bounds its largest magnitude first; 0 for none. What is beyond the
            largest bound of all counts as that.
    """

    bits: int = 8
    levels: int | None = None
    clip: float = 0.0

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ConfigurationError(f"bits={self.bits!r} is not possible; choose 2, 4 or 8")
        if self.levels is not None and not 1 <= self.levels < 1 << (self.bits - 1):
            raise ConfigurationError(
                f"levels={self.levels!r} is out of range; choose 1 <= levels < {1 << (self.bits - 1)} "
                f"for bits={self.bits}"
            )

    def levels_for(self, workers: int) -> int:
        """How many levels on each side of zero ``workers`` workers have.

        Raises:
            ConfigurationError: If their sums would not fit the bits.
        """
        fitting = ((1 << self.bits) - 1) // (2 * workers)
        levels = fitting if self.levels is None else self.levels
        if not 1 <= levels <= fitting:
            most = ((1 << self.bits) - 1) // (2 * (self.levels or 1))
            raise ConfigurationError(
                f"{workers} workers' integers do not fit bits={self.bits} when they are added: with "
                f"{self.levels or 1} on each side of zero there is room for {most} workers; choose "
                + ("bits=8 or a gather method such as qsgd" if self.bits < 8 else "a gather method such as qsgd")
            )
        return levels

    def scales(self, block: Block, admitted: Tensor, feedback: Feedback) -> Tensor:
        """This worker's largest magnitudes, clipped; the residual keeps the compensated values."""
        scales = torch.empty(block.segment_count, device=admitted.device, dtype=torch.float32)
        kernels.integer_scales(self._code(1), block, feedback.source(admitted), scales)
        if not self.clip:
            return scales
        bounds = torch.stack([self.clip * _deviation(values) for values in block.segmented(feedback.buffer(admitted))])
        return torch.where(bounds > 0, torch.minimum(scales, bounds.float()), scales)

    def encode(
        self, block: Block, admitted: Tensor, feedback: Feedback, scales: Tensor, workers: int, key: int, more: int = 0
    ) -> Tensor:
        """Codes of the compensated values, which are taken from the residual; with room for some ``more`` bytes."""
        code, values, subtract = self._code(workers), feedback.buffer(admitted), feedback.residual is not None
        size = code.layout.body(block.positions)
        codes = torch.empty(size + more, dtype=torch.uint8, device=admitted.device)
        kernels.integer_encode(code, block, values, subtract, scales, codes[:size], key)
        return codes

    def decode(self, block: Block, scales: Tensor, codes: Tensor, out: Tensor, workers: int) -> None:
        """Writes the mean that the sum of all workers' codes stands for."""
        kernels.integer_decode(self._code(workers), block, scales, codes, out)

    def _code(self, workers: int) -> Integers:
        return Integers(self.bits, self.levels_for(workers), workers)


def integer(
    code: SharedLevels, block: Block, gradient: Tensor, feedback: Feedback, key: int, workers: int
) -> Synchronization:
    """Agrees on scales, then adds integers: 2 b (n - 1) / n bytes for codes and scales of b bytes, in two rounds.

    Args:
        code: How many levels, in how many bits.
        block: Which elements of ``gradient``.
        gradient: ``float32`` flat buffer; left with the average.
        feedback: This worker's memory.
        key: Randomness of this rank and step.
        workers: n.

    Raises:
        PayloadError: If the scales that came back are not the largest of all workers'.
    """
    admitted = feedback.before_encode(block, gradient)
    own = code.scales(block, admitted, feedback)
    scales = yield AllReduceMax(own.clone())
    check_largest(scales, own)
    codes = code.encode(block, admitted, feedback, scales, workers, key)
    feedback.after_encode(block, admitted)
    codes = yield AllReduceSum(codes)
    code.decode(block, scales, codes, gradient, workers)
    feedback.after_decode(block, gradient)


def _deviation(values: Tensor) -> Tensor:
    """The standard deviation, in float64; 0 if it may be nothing but rounding, NaN where a value is not finite."""
    variance, mean = torch.var_mean(values.double(), correction=0)
    return variance.masked_fill(variance <= SMALLEST_VARIANCE * mean.square(), 0.0).sqrt()


def check_largest(scales: Tensor, own: Tensor) -> None:
    """Raises PayloadError unless ``scales``, the largest of all workers', are at least this worker's ``own``."""
    largest = scales >= own

    def error() -> PayloadError:
        worst = int(largest.int().argmin())
        return PayloadError(
            f"the largest scale of all workers is {float(scales[worst])}, but this worker's is {float(own[worst])}; "
            "do all ranks run the same configuration?"
        )

    expect(largest.all(), error)
