"""ACP-SGD."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.lowrank import Matrices, check_rank, gains, group, orthonormal_rows, room, written
from gradwire.memory import Feedback
from gradwire.methods.method import Context, Method
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.wire.requests import AllReduceMean, Request, Synchronization


@dataclass(frozen=True, eq=False)
class _State:
    feedback: Feedback
    groups: list[Matrices]
    p: list[Tensor]
    q: list[Tensor]


@register("acpsgd")
@dataclass(frozen=True, kw_only=True)
class ACPSGD(Method):
    """Power iteration that alternates between the two factors, in one all-reduce a step.

    Even steps: ``Q`` is orthonormalised, ``P = M Q`` averaged. Odd steps: ``P`` is orthonormalised, ``Q = M^T P``
    averaged. Each step's average ``P Q^T`` is one half of a PowerSGD step, at half its bytes and half its flops.

    Attributes:
        rank: Rank of the average, at least 1; the paper uses 4 for CNNs and 32 for BERT.
        bits: Of a factor's value on the wire: 32, or 16 for bfloat16. Then the residual is what the average leaves, so
            that it makes up for what is rounded.
    """

    citation = "Zhang et al. 2023, Evaluation and Optimization of Gradient Compression, arXiv:2306.08881"
    published = Published("The paper takes rank 32 for BERT.")
    routes = ("allreduce",)
    granularities = ("layer",)
    why_granularity = "it factorises one matrix at a time"
    memory = "residual"
    bias = "contractive"
    wire_bits = "bits * rank * max(n, m)"

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
        """Groups matrices and starts both factors where none are kept."""
        groups = group(context.block)
        p = [each.factor(context.store, "p", each.rank(self.rank), each.n, context.seed) for each in groups]
        q = [each.factor(context.store, "q", each.rank(self.rank), each.m, context.seed) for each in groups]
        return _State(context.feedback(), groups, p, q)

    def synchronize(self, gradient: Tensor, state: _State, step: int) -> Synchronization:
        """One round. The residual is what this worker's own factor leaves, or the average, where that is rounded."""
        even, exact = step % 2 == 0, self.bits == 32
        project = kernels.project_rows if even else kernels.project_columns
        bases: list[Tensor] = []
        requests: list[Request] = []
        for matrices, basis in zip(state.groups, state.q if even else state.p, strict=True):
            own = basis.new_empty(len(basis), basis.shape[1], matrices.n if even else matrices.m)
            unit, most = orthonormal_rows(basis), room(basis.shape[2])
            bases.append(unit * most)
            for block, fixed, back, factor in zip(matrices.blocks, unit / most, bases[-1], own, strict=True):
                project(block, state.feedback.source(gradient), fixed, factor, subtract=back if exact else None)
            requests.append(AllReduceMean(written(own, self.bits)))
        means = [mean.float() for mean in (yield requests)]

        kept = state.p if even else state.q
        for matrices, basis, mean, factor in zip(state.groups, bases, means, kept, strict=True):
            factor.copy_(torch.where(mean.isfinite().all(), mean, factor))
            p, q = (mean, basis) if even else (basis, mean)
            for block, p_row, q_row in zip(matrices.blocks, p, q, strict=True):
                kernels.write_product(block, p_row, q_row, gradient, None if exact else state.feedback.residual)
