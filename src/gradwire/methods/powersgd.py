"""PowerSGD."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.lowrank import Matrices, check_rank, gains, group, orthonormal_rows, room, scaled_rows, written
from gradwire.memory import Feedback
from gradwire.methods.method import Context, Method
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.wire.requests import AllReduceMean, Request, Synchronization


@dataclass(frozen=True, eq=False)
class _State:
    feedback: Feedback
    groups: list[Matrices]
    q: list[Tensor]


@register("powersgd")
@dataclass(frozen=True, kw_only=True)
class PowerSGD(Method):
    """One warm-started step of subspace iteration a training step, in two all-reduces.

    ``P = M Q``, averaged and orthonormalised; ``Q = M^T P``, averaged; the average is ``P Q^T``. Matrices of one shape
    are handled together, and all of them share the two collectives.

    Attributes:
        rank: Rank of the average, at least 1; the paper uses 2 and 4.
        bits: Of a factor's value on the wire: 32, or 16 for bfloat16. The memory makes up for what is rounded.
    """

    citation = "Vogels et al. 2019, arXiv:1905.13727"
    published = Published("The paper compares ranks 1, 2 and 4.")
    routes = ("allreduce",)
    granularities = ("layer",)
    why_granularity = "it factorises one matrix at a time"
    memory = "residual"
    bias = "contractive"
    wire_bits = "bits * rank * (n + m)"

    rank: int = 4
    bits: int = 32

    def __post_init__(self) -> None:
        check_rank(self.rank, self.bits)

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Matrices that are larger than their factors."""
        return gains(shape, self.rank)

    def error_bound(self, numel: int) -> float:
        """A projection never lengthens what it projects."""
        return 1.0

    def init(self, context: Context) -> _State:
        """Groups matrices and starts ``Q`` where none is kept."""
        groups = group(context.block)
        q = [each.factor(context.store, "q", each.rank(self.rank), each.m, context.seed) for each in groups]
        return _State(context.feedback(), groups, q)

    def synchronize(self, gradient: Tensor, state: _State, step: int) -> Synchronization:
        """The two rounds."""
        feedback = state.feedback
        requests: list[Request] = []
        for matrices, q in zip(state.groups, state.q, strict=True):
            p = q.new_empty(len(q), q.shape[1], matrices.n)
            for block, fixed, factor in zip(matrices.blocks, scaled_rows(q), p, strict=True):
                kernels.project_rows(block, feedback.source(gradient), fixed, factor, subtract=None)
            requests.append(AllReduceMean(written(p, self.bits)))
        ps = [orthonormal_rows(mean.float()) for mean in (yield requests)]

        requests = []
        for matrices, p in zip(state.groups, ps, strict=True):
            q = p.new_empty(len(p), p.shape[1], matrices.m)
            values = feedback.buffer(gradient)
            for block, fixed, factor in zip(matrices.blocks, p / room(matrices.n), q, strict=True):
                kernels.project_columns(block, kernels.Compensated(values), fixed, factor, subtract=None)
            requests.append(AllReduceMean(written(q, self.bits)))
        qs = [mean.float() for mean in (yield requests)]

        for matrices, p, q, kept in zip(state.groups, ps, qs, state.q, strict=True):
            finite = q.isfinite().all()
            kept.copy_(torch.where(finite, q, kept))
            sent = torch.where(finite, q, torch.nan)  # which leaves residuals as they are
            for block, p_row, q_row in zip(matrices.blocks, p * room(matrices.n), sent, strict=True):
                kernels.write_product(block, p_row, q_row, gradient, feedback.residual)
