"""What every choice has in common that takes as many coordinates as the values ask for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.layout import Block, Float32Array, Float64Array, Int64Array, Slot
from gradwire.memory import Feedback, Store
from gradwire.plain import Plain


@dataclass(frozen=True, eq=False)
class Choice:
    """The coordinates that values ask for.

    Attributes:
        positions: ``int64[k]``, ascending; ``block.runs[r, 2]`` is that of a run's first element.
        values: ``float32[k]``, their compensated values.
        counts: ``int64[R]``: how many of each run; -1 for runs of a segment with a value that is not finite, of which
            nothing is chosen.
        magnitudes: ``float32[S]``: what to send in place of the values of a segment, see :meth:`Criterion.sends`; None
            for the values themselves.
    """

    positions: Tensor
    values: Tensor
    counts: Int64Array
    magnitudes: Float32Array | None = None


class Criterion(Plain, ABC):
    """Chooses coordinates by what they hold, however many they are."""

    def installed(self, store: Store, slots: Sequence[Slot], numel: int) -> Criterion:
        """The criterion at home in one flat buffer; see :meth:`gradwire.codecs.codec.Codec.installed`."""
        return self

    def enough(self, block: Block) -> int | None:
        """How many coordinates of a block there is always room for; None where that is learnt from step to step."""
        return None

    @abstractmethod
    def choose(self, block: Block, gradient: Tensor, feedback: Feedback, room: int, key: int) -> Choice:
        """Compensates, then chooses; the residual keeps all for now.

        Args:
            block: Which elements, in which segments.
            gradient: ``float32`` flat buffer.
            feedback: The memory's share.
            room: How many are expected.
            key: Of the random numbers of this step.
        """

    def sends(self, values: Tensor, magnitudes: Tensor) -> Tensor:
        """What goes out of chosen values: the magnitudes of their segments, with their own signs; ``float32[k]``."""
        return torch.copysign(magnitudes, values)

    def sent(self, block: Block, positions: Tensor, values: Tensor) -> None:
        """Told which of the chosen coordinates go out, with their compensated values."""


class Thresholds(Criterion):
    """All magnitudes that reach a threshold, one for each segment, found from how its magnitudes are distributed."""

    def choose(self, block: Block, gradient: Tensor, feedback: Feedback, room: int, key: int) -> Choice:
        """One pass to compensate and measure, one to collect."""
        thresholds, source = self.measured(block, gradient, feedback)
        positions, values, counts = kernels.collect_reaching(block, kernels.Compensated(source), thresholds, room)
        self.counted(block, counts)
        return Choice(positions, values, counts, self.magnitudes(block))

    def measured(self, block: Block, gradient: Tensor, feedback: Feedback) -> tuple[Float32Array, Tensor]:
        """Thresholds, NaN in segments with a value that is not finite, and the compensated values they are of."""
        totals, largest = kernels.magnitude_statistics(block, feedback.source(gradient))
        source = feedback.buffer(gradient)
        with np.errstate(invalid="ignore", over="ignore"):
            thresholds = self.thresholds(block, source, totals, largest).astype(np.float32)
        thresholds[np.isnan(largest)] = np.nan
        return thresholds, source

    @abstractmethod
    def thresholds(self, block: Block, source: Tensor, totals: Float64Array, largest: Float32Array) -> Float32Array:
        """What a magnitude of each segment must reach: ``float32[S]``.

        Args:
            block: Which elements, in which segments.
            source: ``float32`` flat buffer of the compensated values.
            totals: ``float64[S]``: sum of the magnitudes; NaN in a segment with a value that is not finite.
            largest: ``float32[S]``: the largest magnitude; NaN there, too.
        """

    def counted(self, block: Block, counts: Int64Array) -> None:
        """Told how many of each run reach the threshold."""

    def magnitudes(self, block: Block) -> Float32Array | None:
        """See :class:`Choice`."""
        return None
