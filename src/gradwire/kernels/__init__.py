"""The inner loops: ``reference`` is the specification in plain torch, ``cpu`` the same bits in Numba.

Both modules offer the functions of :class:`Kernels`. Payload formats are documented with the reference.

Every encoder first forms the compensated values ``t`` of its block:

* without a residual, ``t = gradient``;
* with one, ``t = beta * residual + gamma * gradient``, and the encoder leaves ``t - sent`` in ``residual``.

A value ``t[i]`` that is not finite never enters the residual: there the residual stays as it was, the payload of that
segment is marked so that every decoder returns NaN for it, and nothing of the segment counts as sent.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor

from gradwire.layout import Block, Float32Array, Float64Array, Int64Array, UInt64Array


class Kernels(Protocol):
    """What a device must offer. Tensors are contiguous; values float32, payloads uint8, positions int64."""

    def accumulate(self, block: Block, gradient: Tensor, residual: Tensor, beta: float, gamma: float) -> bool:
        """``residual = beta * residual + gamma * gradient`` over the block's runs; returns whether all is finite."""
        ...

    def narrow(self, block: Block, values: Tensor, kept: Tensor, key: int) -> None:
        """``kept``, bfloat16, takes the finite ``values`` over the block's runs: exactly on average, never infinite.

        Each is rounded to one of its two neighbours, to the farther one with a probability that is its distance from
        the nearer one as a share of theirs.
        """
        ...

    def sign_payload_bytes(self, block: Block) -> int:
        """Size of a sign payload."""
        ...

    def sign_encode(
        self, block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float, payload: Tensor
    ) -> None:
        """One bit a position and one scale, mean ``|t|``, a segment: sent = scale * sign(t), sign(0) = +1."""
        ...

    def sign_decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """``out = weight * sum of the decoded payloads`` over the runs, summed in row order."""
        ...

    def vote_encode(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        payload: Tensor,
        key: int,
    ) -> None:
        """A sign payload with all scales 1: sent = sign(t), where a zero takes a random sign."""
        ...

    def two_means_payload_bytes(self, block: Block) -> int:
        """Size of a two-means payload."""
        ...

    def two_means_encode(
        self, block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float, payload: Tensor
    ) -> None:
        """One bit a position and two means a segment: sent = mean of the values on the same side of zero."""
        ...

    def two_means_decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """``out = weight * sum of the decoded payloads`` over the runs, summed in row order."""
        ...

    def stochastic_payload_bytes(self, block: Block, bits: int, bucket: int) -> int:
        """Size of a stochastic payload; ``bucket`` 0 means one scale a segment."""
        ...

    def stochastic_encode(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        payload: Tensor,
        bits: int,
        bucket: int,
        euclidean: bool,
        key: int,
        nearest: bool = False,
    ) -> None:
        """QSGD levels of ``bits`` bits (sign included) against the norm of each ``bucket`` elements of a segment.

        With ``nearest`` no level is drawn: the nearest one is taken.
        """
        ...

    def stochastic_decode(
        self, block: Block, payloads: Tensor, out: Tensor, weight: float, bits: int, bucket: int
    ) -> None:
        """``out = weight * sum of the decoded payloads`` over the runs, summed in row order."""
        ...

    def integer_scales(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        bucket: int,
        scales: Tensor,
    ) -> None:
        """The largest ``|t|`` of each bucket, infinity where any ``t`` is not finite; leaves ``t`` in the residual."""
        ...

    def integer_encode(
        self,
        block: Block,
        values: Tensor,
        subtract: bool,
        scales: Tensor,
        levels: int,
        bits: int,
        bucket: int,
        codes: Tensor,
        key: int,
    ) -> None:
        """Codes of ``bits`` bits, ``levels`` of them on each side of zero; with ``subtract`` takes them from values."""
        ...

    def integer_decode(
        self,
        block: Block,
        scales: Tensor,
        codes: Tensor,
        out: Tensor,
        levels: int,
        bits: int,
        bucket: int,
        workers: int,
    ) -> None:
        """``out`` = what codes added up over ``workers`` stand for, divided by their number."""
        ...

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

    def gather(self, block: Block, source: Tensor, positions: Tensor, values: Tensor) -> None:
        """``values[j] = source`` at ``positions[j]``."""
        ...

    def subtract(self, block: Block, residual: Tensor, positions: Tensor, values: Tensor) -> None:
        """``residual -= values`` at ``positions``; values that are not finite count as not sent."""
        ...

    def scatter_sum(
        self,
        block: Block,
        positions: Tensor,
        values: Tensor,
        out: Tensor,
        weight: float,
        filled: Int64Array | None = None,
    ) -> None:
        """``out = weight * sum over rows`` of sparse rows ``positions[n, K]``, ``values[n, K]``; zero elsewhere.

        With ``filled`` only the first ``filled[n]`` entries of each row count.
        """
        ...

    def scatter_mean(self, block: Block, positions: Tensor, values: Tensor, out: Tensor) -> None:
        """``out`` = the mean over those sparse rows, ascending each, that have the position; zero elsewhere."""
        ...

    def project_rows(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        q: Tensor,
        p: Tensor,
        subtract: bool,
    ) -> bool:
        """``p = q @ t.T`` for a block of one matrix ``t [n, m]``, ``q [r, m]``, ``p [r, n]``.

        Leaves ``t``, or with ``subtract`` ``t - p.T @ q``, in the residual. Returns whether ``t`` is finite; if not,
        ``p`` is NaN and nothing is subtracted.
        """
        ...

    def project_columns(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        p: Tensor,
        q: Tensor,
        subtract: bool,
    ) -> bool:
        """``q = p @ t``; otherwise as :meth:`project_rows`."""
        ...

    def write_product(self, block: Block, p: Tensor, q: Tensor, out: Tensor, residual: Tensor | None) -> None:
        """``out = p.T @ q`` over a block of one matrix, taken from the residual if one is given."""
        ...

    def gaps_encode(self, positions: Tensor, universe: int, classes: Tensor, low: Tensor) -> int:
        """A class ``uint8[n]`` for each gap, and low bits in ``uint8[gaps_low_bytes]``: returns how many bytes."""
        ...

    def gaps_decode(self, classes: Tensor, low: Tensor, universe: int, positions: Tensor) -> None:
        """Reads positions back; raises PayloadError unless they are distinct and below ``universe``."""
        ...

    def bitmap_encode(self, positions: Tensor, universe: int, payload: Tensor) -> None:
        """Bit ``p % 8`` of byte ``p // 8`` is set where position ``p``, below ``universe``, is there."""
        ...

    def bitmap_decode(self, payload: Tensor, universe: int, positions: Tensor) -> None:
        """Reads ``positions.numel()`` positions; PayloadError unless there are so many, all below ``universe``."""

    def sketch(self, block: Block, values: Tensor, columns: Int64Array, rows: int, key: int, table: Tensor) -> None:
        """Count sketches, one a segment: ``table`` holds ``rows`` rows of ``columns[s]``, segment after segment."""
        ...

    def sketch_estimates(
        self, block: Block, table: Tensor, columns: Int64Array, rows: int, key: int, out: Tensor
    ) -> None:
        """Each element's median over the rows of its segment's sketch; ``rows`` is odd."""
        ...

    def rotated_scales(self, pieces: Int64Array, values: Tensor, scales: Tensor) -> None:
        """Root mean square of each piece of a :class:`gradwire.transform.Rotation`, zeros past its values included."""
        ...

    def rotated_encode(
        self,
        pieces: Int64Array,
        values: Tensor,
        residual: Tensor | None,
        scales: Tensor,
        levels: Tensor,
        reach: float,
        shared: UInt64Array,
        own: UInt64Array,
        payload: Tensor,
    ) -> None:
        """4-bit codes of the levels to which each rotated piece's coordinates are rounded.

        Args:
            pieces: As of a rotation.
            values: ``float32`` flat buffer.
            residual: Holds the values; what is sent is subtracted.
            scales: Of each piece; where not finite or 0, codes are 0 and nothing is subtracted.
            levels: ``uint8[16]``, ascending from 0.
            reach: What the last level stands for; the first stands for its negative.
            shared: Each run's key for the signs of the rotation.
            own: Each run's key for rounding.
            payload: ``uint8``, two codes a byte, lower half first.
        """
        ...

    def rotated_sums(self, payloads: Tensor, levels: Tensor, sums: Tensor) -> None:
        """Adds up the integers of all rows' codes, to one byte each or two, little-endian, as ``sums`` has room for."""
        ...

    def rotated_decode(
        self,
        pieces: Int64Array,
        sums: Tensor,
        count: int,
        scales: Tensor,
        levels: Tensor,
        reach: float,
        shared: UInt64Array,
        out: Tensor,
    ) -> None:
        """Rotates back the mean of ``count`` workers; a piece whose scale is not finite becomes NaN."""
        ...

    def elias_fano_bytes(self, count: int, universe: int) -> int:
        """Size of ``count`` ascending distinct positions below ``universe``."""
        ...

    def elias_fano_encode(self, positions: Tensor, universe: int, payload: Tensor) -> None:
        """Writes ascending distinct positions in at most ``2 + log2(universe / count)`` bits each."""
        ...

    def elias_fano_decode(self, payload: Tensor, universe: int, positions: Tensor) -> None:
        """Reads ``positions.numel()`` positions; PayloadError unless ascending, distinct and below ``universe``."""
        ...

    def trits_payload_bytes(self, block: Block) -> int:
        """Size of a payload of trits."""
        ...

    def ternary_encode(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        payload: Tensor,
        clip: float,
        key: int,
    ) -> None:
        """TernGrad's trits: sent = scale * sign(t) with probability ``|t| / scale``, else 0."""
        ...

    def three_level_encode(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        payload: Tensor,
        sparsity: float,
    ) -> None:
        """3LC's trits: sent = scale * sign(t) where ``|t| > scale / 2``, with scale = sparsity * max ``|t|``."""
        ...

    def trits_decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """``out = weight * sum of the decoded payloads`` over the runs, summed in row order."""
        ...

    def power_of_two_payload_bytes(self, block: Block, bits: int) -> int:
        """Size of a payload of powers of two, of 8 or 9 bits a position."""
        ...

    def power_of_two_encode(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        payload: Tensor,
        bits: int,
        key: int,
    ) -> None:
        """Natural compression: sent = one of the two powers of two around t, right on average."""
        ...

    def power_of_two_decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float, bits: int) -> None:
        """``out = weight * sum of the decoded payloads`` over the runs, summed in row order."""
        ...

    def dynamic_payload_bytes(self, block: Block) -> int:
        """Size of a payload of table entries."""
        ...

    def dynamic_encode(
        self, block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float, payload: Tensor
    ) -> None:
        """The 8-bit dynamic tree: sent = the nearest entry of its table times the largest magnitude of a segment."""
        ...

    def dynamic_decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """``out = weight * sum of the decoded payloads`` over the runs, summed in row order."""
        ...

    def exponent_payload_bytes(self, block: Block) -> int:
        """Size of a payload of 4-bit exponents."""
        ...

    def exponent_encode(
        self, block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float, payload: Tensor
    ) -> None:
        """Sent = the nearest of the seven powers of two below the largest ``|t|`` of a segment, or 0, with the sign."""
        ...

    def exponent_decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """``out = weight * sum of the decoded payloads`` over the runs, summed in row order."""
        ...

    def zero_runs_encode(self, trits: Tensor, coded: Tensor) -> int:
        """Writes packed trits with their runs of zeros shortened to ``coded``, of at least their size.

        Returns how many bytes that took; PayloadError if a byte is not five trits.
        """
        ...

    def zero_runs_decode(self, coded: Tensor, trits: Tensor) -> int:
        """Reads all of ``coded`` to ``trits``, whose rest is zeros then, and returns how many bytes that made.

        PayloadError, and nothing written, unless an encoder can have written it, and has for no more than ``trits``.
        """
        ...

    def merge_top(
        self,
        counts: Int64Array,
        first_positions: Tensor,
        first_values: Tensor,
        second_positions: Tensor,
        second_values: Tensor,
        positions: Tensor,
        values: Tensor,
    ) -> None:
        """The ``counts[s]`` largest magnitudes of the sum of two sparse sets with as many values in each segment ``s``.

        A segment whose sum is not finite has its first positions, with values NaN.
        """
        ...

    def checksums(self, words: Tensor, sums: Tensor) -> None:
        """Sums up the words of each row, taken as unsigned and weighted by 1, 3, 5, …, modulo ``2**64``.

        Weights are modulo ``2**32``.

        Args:
            words: ``int32[n, m]``, contiguous.
            sums: ``int64[n]``, to be filled.
        """
        ...

    def survivors(self, positions: Tensor, kept_positions: Tensor, kept_values: Tensor, flags: Tensor) -> None:
        """Clears the flags, ``bool``, of ascending positions where an ascending set has no finite value."""
        ...

    def quantile_payload_bytes(self, block: Block, buckets: int, rows: int, columns: float) -> int:
        """Size of a quantile payload; ``rows`` 0 means no sketch."""
        ...

    def quantile_encode(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        payload: Tensor,
        buckets: int,
        rows: int,
        columns: float,
        key: int,
    ) -> None:
        """Means of equally filled buckets, and each value's bucket or a MinMaxSketch of them."""
        ...

    def quantile_decode(
        self, block: Block, payloads: Tensor, out: Tensor, weight: float, buckets: int, rows: int, columns: float
    ) -> None:
        """``out = weight * sum of the decoded payloads`` over the runs, summed in row order."""
        ...

    def scatter(self, block: Block, target: Tensor, positions: Tensor, values: Tensor) -> None:
        """``target = values`` at ``positions``."""
        ...

    def magnitude_statistics(
        self, block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float
    ) -> tuple[Float64Array, Float32Array]:
        """``sum |t|`` and ``max |t|`` of each segment, NaN where ``t`` is not finite; leaves ``t`` in the residual."""
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

    def inceptionn_payload_bytes(self, block: Block, room: int) -> int:
        """Size of an INCEPTIONN payload with room for ``room`` bytes of values, a multiple of 4."""
        ...

    def inceptionn_encode(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        payload: Tensor,
        bound: int,
    ) -> None:
        """Shifted mantissas, cut off below ``2**-bound``; the bound is doubled until they fit the payload."""
        ...

    def inceptionn_decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float, bound: int) -> None:
        """``out = weight * sum of the decoded payloads`` over the runs, in row order; PayloadError unless sound."""
        ...

    def sign_counts(self, block: Block, source: Tensor) -> tuple[Int64Array, Int64Array]:
        """How many values of each segment are positive, and how many negative."""
        ...


def for_device(device: torch.device) -> Kernels:
    """The kernels for tensors on ``device``: Numba on the CPU, the plain torch reference elsewhere."""
    return _load("cpu" if device.type == "cpu" else "reference")


@cache
def _load(name: str) -> Kernels:
    return cast(Kernels, import_module(f"gradwire.kernels.{name}"))
