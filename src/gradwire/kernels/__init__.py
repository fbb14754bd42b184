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

from gradwire.layout import Block, Int64Array


class Kernels(Protocol):
    """What a device must offer. Tensors are contiguous; values float32, payloads uint8, positions int64."""

    def accumulate(self, block: Block, gradient: Tensor, residual: Tensor, beta: float, gamma: float) -> bool:
        """``residual = beta * residual + gamma * gradient`` over the block's runs; returns whether all is finite."""
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
    ) -> None:
        """QSGD levels of ``bits`` bits (sign included) against the norm of each ``bucket`` elements of a segment."""
        ...

    def stochastic_decode(
        self, block: Block, payloads: Tensor, out: Tensor, weight: float, bits: int, bucket: int
    ) -> None:
        """``out = weight * sum of the decoded payloads`` over the runs, summed in row order."""
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

    def scatter_sum(self, block: Block, positions: Tensor, values: Tensor, out: Tensor, weight: float) -> None:
        """``out = weight * sum over rows`` of sparse rows ``positions[n, K]``, ``values[n, K]``; zero elsewhere."""
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

    def bitmap_encode(self, positions: Tensor, universe: int, payload: Tensor) -> None:
        """Bit ``p % 8`` of byte ``p // 8`` is set where position ``p``, below ``universe``, is there."""
        ...

    def bitmap_decode(self, payload: Tensor, universe: int, positions: Tensor) -> None:
        """Reads ``positions.numel()`` positions; PayloadError unless there are so many, all below ``universe``."""
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


def for_device(device: torch.device) -> Kernels:
    """The kernels for tensors on ``device``: Numba on the CPU, the plain torch reference elsewhere."""
    return _load("cpu" if device.type == "cpu" else "reference")


@cache
def _load(name: str) -> Kernels:
    return cast(Kernels, import_module(f"gradwire.kernels.{name}"))


def warm_up(device: torch.device) -> None:
    """Compiles, or loads from the cache on disk, all that a training step on ``device`` will call."""
    if device.type == "cpu":
        import_module("gradwire.kernels.cpu").warm_up()
