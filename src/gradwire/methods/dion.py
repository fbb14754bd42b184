"""Dion: distributed orthonormalised updates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.lowrank import (
    Factors,
    Matrices,
    filled,
    gains,
    group,
    orthonormal,
    project_columns,
    project_rows,
    room,
    write_products,
)
from gradwire.errors import ConfigurationError
from gradwire.exact import length
from gradwire.memory import Feedback, Residual
from gradwire.methods.method import Context, Method
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.wire.requests import AllReduceMean, Synchronization


@dataclass(frozen=True, eq=False)
class _State:
    momentum: Feedback
    groups: list[Matrices]
    q: Factors
    starts: Factors


@register("dion")
@dataclass(frozen=True, kw_only=True)
class Dion(Method):
    """Workers keep momenta of their own, and the average is their mean's orthonormalised low-rank part.

    ``M += G``; ``P = M Q``, averaged and orthonormalised; ``R = M^T P``, averaged; ``M -= (1 - momentum) P R^T``, the
    error feedback; ``Q`` is ``R`` with its columns normalised, and the gradient is ``sqrt(n / m) P Q^T`` for a matrix
    of n rows and m columns. Use it with plain SGD, whose weight decay is then the paper's. A learning rate means the
    same for matrices of all sizes; the paper has 0.01 for them.

    Verified against the authors' code (microsoft/dion), its form with compressed all-reduces. There a wide matrix is
    transposed first, QR is randomised, and ranks are rounded up to a multiple on request; all of it is left out here,
    as in the paper's algorithm. What is no matrix, or gains nothing, is averaged densely and comes as it is: give such
    parameters a group with a learning rate of its own, or an optimizer such as Lion or Adam, as the authors do. The
    momentum is the method's memory and takes no other.

    Attributes:
        rank_fraction: Rank as a share of the shorter side, in (0, 1); the paper goes down to 1/16.
        momentum: Share of what was sent that stays in the momentum, in [0, 1).
    """

    citation = "Ahn et al. 2025, arXiv:2504.05295"
    published = Published(
        "The paper goes from full rank, which leaves nothing to compress, to 1/16. In the authors' code wide matrices "
        "are transposed first and QR is randomised. Zeros of a factor are those of its start again here: what comes to "
        "rows and columns that had nothing before would never be sent."
    )
    routes = ("allreduce",)
    granularities = ("layer",)
    why_granularity = "it factorises one matrix at a time"
    memories = ("none",)
    why_no_mean = "an orthonormal matrix has no magnitude"
    bias = "biased"
    wire_bits = "32 * ceil(rank_fraction * min(n, m)) * (n + m)"

    rank_fraction: float = 0.25
    momentum: float = 0.95

    def __post_init__(self) -> None:
        if not 0 < self.rank_fraction < 1:
            raise ConfigurationError(
                f"rank_fraction={self.rank_fraction!r} is out of range; choose 0 < rank_fraction < 1, usually 1/4"
            )
        if not 0 <= self.momentum < 1:
            raise ConfigurationError(
                f"momentum={self.momentum!r} is out of range; choose 0 <= momentum < 1, usually 0.95"
            )

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Matrices that are larger than their factors."""
        return bool(shape) and gains(shape, self._rank(shape[0], math.prod(shape[1:])))

    def _rank(self, n: int, m: int) -> int:
        return math.ceil(self.rank_fraction * min(n, m))

    def init(self, context: Context) -> _State:
        """Groups matrices, finds the momenta and starts ``Q`` where none is kept."""
        groups = group(context.block)
        q = [each.factor(context.store, "q", self._rank(each.n, each.m), each.m, context.seed) for each in groups]
        starts = [each.start(context.store, "q", self._rank(each.n, each.m), each.m, context.seed) for each in groups]
        units = [(start / length(start)).float() for start in starts]
        momentum = Residual().feedback(context.store, "momentum", context.block.slots, context.numel)
        return _State(momentum, groups, q, units)

    def synchronize(self, gradient: Tensor, state: _State, step: int) -> Synchronization:
        """The two rounds. Where ``R`` has a zero column, as for zero gradients, that of ``Q`` stays."""
        momentum, groups = state.momentum.buffer(gradient), state.groups
        most = [room(matrices.n) for matrices in groups]
        fixed = list(torch._foreach_div(filled(state.q, state.starts), [room(matrices.m) for matrices in groups]))
        own = project_rows(groups, kernels.Compensated(gradient, momentum), fixed)
        ps = orthonormal((yield [AllReduceMean(p) for p in own]))

        own = project_columns(groups, kernels.Compensated(momentum), list(torch._foreach_div(ps, most)))
        rs = yield [AllReduceMean(r) for r in own]

        sent, units = [], []
        for r, q in zip(rs, state.q, strict=True):
            lengths = length(r)
            units.append(torch.where(lengths == 0, 0, r / lengths).float())
            finite = r.isfinite().all()
            q.copy_(torch.where((lengths != 0) & finite, units[-1], q))
            sent.append(torch.where(finite, (1 - self.momentum) * r, torch.nan))  # which leaves momenta as they are
        write_products(groups, list(torch._foreach_mul(ps, most)), sent, gradient, momentum)
        scales = [math.sqrt(matrices.n / matrices.m) for matrices in groups]
        write_products(groups, ps, list(torch._foreach_mul(units, scales)), gradient, None)
