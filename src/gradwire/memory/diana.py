"""DIANA: unbiased operators compress differences from an estimate that follows the gradient slowly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.errors import ConfigurationError
from gradwire.layout import Block, Slot
from gradwire.memory.feedback import Feedback, Memory
from gradwire.memory.kind import Kind
from gradwire.memory.lowpass import LowPass
from gradwire.memory.staged import StagedFeedback
from gradwire.memory.store import Store


@dataclass(frozen=True, eq=False, kw_only=True)
class _ShiftedFeedback(StagedFeedback):
    estimate: Tensor
    alpha: float

    def after_encode(self, block: Block, admitted: Tensor) -> None:
        """From ``-h`` to ``-(h + alpha q)``, by means of ``g - h - q``, which the encoder left."""
        kernels.accumulate(block, self.residual, self.kept, 1 - self.alpha, self.alpha)
        kernels.accumulate(block, admitted, self.kept, 1.0, -self.alpha)

    def after_decode(self, block: Block, average: Tensor) -> None:
        """``H += alpha mean q``; the average is ``mean q`` and the former ``H``, unless what came is not finite."""
        finite = kernels.accumulate(block, average, self.estimate, 1.0, self.alpha)
        kernels.accumulate(block, self.estimate, average, 1 - self.alpha, 1.0, when=finite)


@dataclass(frozen=True)
class Diana(Memory):
    """Differences for unbiased operators (Mishchenko et al. 2019, arXiv:1901.09269).

    ``q = Q(g - h)``, the average applied is ``H + mean q``, then ``h += alpha q`` and ``H += alpha mean q``. Averages
    stay unbiased, and where gradients settle, what is compressed goes to zero and with it the error, however coarse the
    operator is. Where gradients are small next to their noise, nothing is gained.

    Where an average is compressed again the owner does the same with ``mean h - H + mean q``: what everybody knows
    follows the mean of the workers' estimates at the same pace.

    Attributes:
        alpha: How fast estimates follow, in (0, 1]; None for ``1 / (1 + Omega)``, the largest that the paper allows, of
            the method's error bound Omega for the longest segment of a buffer.
    """

    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.alpha is not None and not 0 < self.alpha <= 1:
            raise ConfigurationError(
                f"alpha={self.alpha!r} is out of range; choose 0 < alpha <= 1, or None for 1 / (1 + error bound)"
            )

    @property
    def unbiased(self) -> bool:
        """For these it is made; what is biased goes straight to the gradient with EF21."""
        return True

    def fitted(self, bound: float, workers: int) -> Memory:
        """With the ``alpha`` that goes with a bound.

        Raises:
            ConfigurationError: If the one given is larger.
        """
        most = 1 / (1 + bound)
        if self.alpha is None:
            return replace(self, alpha=most)
        if self.alpha > most and not math.isclose(self.alpha, most):
            raise ConfigurationError(
                f"alpha={self.alpha!r} is too large for a method with an error bound of {bound:g}; choose at most "
                f"1 / (1 + {bound:g}) = {most:g}, or None for that"
            )
        return self

    def feedback(self, store: Store, field: str, slots: Sequence[Slot], numel: int, kind: Kind = Kind.MEAN) -> Feedback:
        """Keeps two float32 an element, beside scratch space of one."""
        lag = store.flat(f"{field}.lag", slots, numel, kind)
        return _ShiftedFeedback(
            residual=torch.zeros_like(lag),
            unbiased=True,
            kept=lag,
            estimate=store.flat(f"{field}.estimate", slots, numel, Kind.SHARED),
            alpha=self._pace,
        )

    def estimates(self, field: str) -> tuple[str, str]:
        """The worker's, which the residual holds negative, and the sum."""
        return f"{field}.lag", f"{field}.estimate"

    def owner(self) -> Memory:
        """How far what everybody knows is behind the mean of the workers' estimates: ``e += alpha (mean q - sent)``."""
        return LowPass(share=self._pace, reset=0)

    @property
    def _pace(self) -> float:
        return 1.0 if self.alpha is None else self.alpha

    def __str__(self) -> str:
        return "diana" if self.alpha is None else f"diana(alpha={self.alpha})"
