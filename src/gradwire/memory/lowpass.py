"""Error feedback through a low-pass filter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.errors import ConfigurationError
from gradwire.layout import Block, Slot
from gradwire.memory.feedback import Feedback, Memory, Remainder
from gradwire.memory.kind import Kind
from gradwire.memory.staged import StagedFeedback, kept_ages
from gradwire.memory.store import Store


@dataclass(frozen=True, eq=False, kw_only=True)
class _LowPassFeedback(StagedFeedback):
    ages: Tensor
    share: float
    reset: int

    def after_encode(self, block: Block, admitted: Tensor) -> None:
        """``m = (1 - share) m + share (m + g - sent)``, or zero when its time is up."""
        self.ages.add_(1)
        if self.reset and bool((self.ages >= self.reset).any()):
            self.ages.zero_()
            for kept in block.parts(self.kept):
                kept.zero_()
            return
        kernels.accumulate(block, self.residual, self.kept, 1 - self.share, self.share)


@dataclass(frozen=True)
class LowPass(Memory):
    """A moving average of what was not sent: ``m = (1 - share) m + share (m + g - sent)``, where ``m + g`` is encoded.

    This is ScaleCom's filter (Chen et al. 2020, arXiv:2104.11125), which damps the noise of large batches, and LoCo's
    (Xie et al. 2024, arXiv:2407.04480), which also forgets all every so many steps; ``share=1`` is error feedback. With
    a smaller share some of what was not sent is given up: average and memory add up to the input no more. LoCo keeps 8
    bits a value; here it is float32, beside float32 scratch space that holds nothing between steps.

    The defaults are LoCo's as DeepSpeed has them, ``err_beta=0.8`` and ``reset_T=1024``.

    Attributes:
        share: Weight of the newest error, in (0, 1]: ScaleCom's ``beta``, and ``1 - err_beta`` for LoCo.
        reset: Steps after which the memory starts anew; 0 for never, as in ScaleCom.
    """

    share: float = 0.2
    reset: int = 1024

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigurationError(
                f"share={self.share!r} is out of range; choose 0 < share <= 1, usually 0.2, or 1 for a plain residual"
            )
        given: Any = self.reset  # NumPy's whole numbers are as good
        if not (isinstance(given, Integral) and self.reset >= 0):
            raise ConfigurationError(
                f"reset={self.reset!r} is out of range; choose a whole number of steps, or 0 for never"
            )

    def bears(self, remainder: Remainder) -> bool:
        """With a share below 1, noise that is no larger than the largest value is averaged out."""
        return remainder == "shrinks" or (remainder == "stays" and self.share < 1)

    def feedback(self, store: Store, field: str, slots: Sequence[Slot], numel: int, kind: Kind = Kind.MEAN) -> Feedback:
        """Keeps one float32 an element, and a counter for each parameter."""
        filtered = store.flat(f"{field}.filtered", slots, numel, kind)
        return _LowPassFeedback(
            residual=torch.zeros_like(filtered),
            kept=filtered,
            ages=kept_ages(store, field, slots),
            share=self.share,
            reset=self.reset,
        )

    @property
    def keeps(self) -> float:
        """The share."""
        return self.share

    def owed(self, field: str) -> tuple[str, ...]:
        """The filtered residual."""
        return (f"{field}.filtered",)

    def __str__(self) -> str:
        return f"lowpass(share={self.share}{f', reset={self.reset}' if self.reset else ''})"
