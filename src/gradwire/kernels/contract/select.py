"""Which coordinates are sent."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gradwire.layout import Block, Float32Array, Float64Array, Int64Array


class Select(Protocol):
    """Which coordinates are sent."""

    def topk_select(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        counts: Int64Array,
        positions: Tensor,
        values: Tensor,
    ) -> None:
        """The ``counts[s]`` largest magnitudes of each segment: ascending positions and their ``t``.

        Leaves all of ``t`` in the residual: ``subtract`` takes away what the value coding really sent.
        """
        ...

    def randomk_positions(self, block: Block, counts: Int64Array, positions: Tensor, key: int) -> None:
        """``counts[s]`` distinct positions of each segment, uniform, from ``key`` alone."""
        ...

    def magnitude_statistics(
        self, block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float
    ) -> tuple[Float64Array, Float32Array]:
        """``sum |t|`` and ``max |t|`` of each segment, NaN where ``t`` is not finite; leaves ``t`` in the residual."""
        ...

    def sign_counts(self, block: Block, source: Tensor) -> tuple[Int64Array, Int64Array]:
        """How many values of each segment are positive, and how many negative."""
        ...

    def exceedances(self, block: Block, source: Tensor, thresholds: Float32Array) -> tuple[Int64Array, Float64Array]:
        """How many magnitudes of ``source`` reach their segment's threshold, and their sum; 0 for a NaN threshold."""
        ...

    def collect_reaching(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        thresholds: Float32Array,
        room: int,
    ) -> tuple[Tensor, Tensor, Int64Array]:
        """All ``t`` but zeros whose magnitude reaches the threshold of their segment; leaves ``t`` in the residual.

        Args:
            block: Which elements, in which segments.
            gradient: ``float32`` flat buffer.
            residual: As :meth:`accumulate`; None for none.
            beta: Weight of the residual.
            gamma: Weight of the gradient.
            thresholds: ``float32[S]``; NaN for a segment of which nothing is to be chosen.
            room: How many are expected.

        Returns:
            Ascending positions; their values; how many of each run, or -1 for runs of a segment with threshold NaN or
            with a ``t`` that is not finite.
        """
        ...

    def collect_unambiguous(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        squares: Tensor | None,
        moments: Tensor,
        alpha: float,
        decay: float,
        threshold: float,
        room: int,
    ) -> tuple[Tensor, Tensor, Int64Array]:
        """All ``t`` with ``t**2 > alpha * v`` and ``|t| > threshold``, after ``v = moments + squares``.

        Leaves ``t`` in the residual and ``v`` in ``moments``, times ``decay`` where not chosen; neither takes in what
        is not finite. ``squares`` are zeroed; None stands for the gradient's. Otherwise as :meth:`collect_reaching`.
        """
        ...

    def collect_local_maxima(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        bins: Int64Array,
        room: int,
    ) -> tuple[Tensor, Tensor, Int64Array, Float32Array]:
        """All ``t`` but zeros with ``|t + gamma * gradient|`` at least the largest ``|t|`` of their bin.

        Bins are ``bins[R]`` consecutive elements of a run, the last one perhaps fewer. Leaves ``t`` in the residual.
        Otherwise as :meth:`collect_unambiguous`, and with the mean over bins of that largest ``|t|`` of each segment.
        """
        ...
