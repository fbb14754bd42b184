"""PowerSGD."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.lowrank import (
    Factors,
    Matrices,
    check_rank,
    group,
    orthonormal,
    project_columns,
    project_rows,
    refilled,
    remember,
    room,
    scaled,
    write_products,
    written,
)
from gradwire.memory import Feedback
from gradwire.methods.factorised import Factorised
from gradwire.methods.method import Context
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.wire.requests import AllReduceMean, Request, Synchronization


@dataclass(frozen=True, eq=False)
class _State:
    feedback: Feedback
    groups: list[Matrices]
    q: Factors
    starts: Factors


@register("powersgd")
@dataclass(frozen=True, kw_only=True)
class PowerSGD(Factorised):
    """One warm-started step of subspace iteration a training step, in two all-reduces.

    ``P = M Q``, averaged and orthonormalised; ``Q = M^T P``, averaged; the average is ``P Q^T``. Matrices of one shape
    are handled together, and all of them share the two collectives.

    Attributes:
        rank: Rank of the average, at least 1; the paper uses 2 and 4.
        bits: Of a factor's value on the wire: 32, or 16 for bfloat16. The memory makes up for what is rounded.
    """

    citation = "Vogels et al. 2019, arXiv:1905.13727"
    published = Published(
        "The paper compares ranks 1, 2 and 4. Its authors' later package averages one factor a step unless asked for "
        "more, as `acpsgd` does, after 100 dense steps (`start=100`). Zeros of a factor are those of its start again "
        "here: what comes to rows and columns that had nothing before would never be sent."
    )
    wire_bits = "bits * rank * (n + m)"

    rank: int = 4
    bits: int = 32

    def __post_init__(self) -> None:
        check_rank(self.rank, self.bits)

    def init(self, context: Context) -> _State:
        """Groups matrices and starts ``Q`` where none is kept."""
        groups = group(context.block)
        q = [each.factor(context.store, "q", each.rank(self.rank), each.m, context.seed) for each in groups]
        starts = [each.start(context.store, "q", each.rank(self.rank), each.m, context.seed) for each in groups]
        return _State(context.feedback(), groups, q, scaled(starts))

    def synchronize(self, gradient: Tensor, state: _State, step: int) -> Synchronization:
        """The two rounds."""
        feedback, groups = state.feedback, state.groups
        fixed = refilled(state.q, state.starts)
        own = project_rows(groups, feedback.source(gradient), fixed)
        requests: list[Request] = [AllReduceMean(written(p, self.bits)) for p in own]
        ps = orthonormal([mean.float() for mean in (yield requests)])

        most = [room(matrices.n) for matrices in groups]
        values = kernels.Compensated(feedback.buffer(gradient))
        own = project_columns(groups, values, list(torch._foreach_div(ps, most)))
        qs = [mean.float() for mean in (yield [AllReduceMean(written(q, self.bits)) for q in own])]

        sent = remember(state.q, qs)  # what is not finite leaves residuals as they are
        write_products(groups, list(torch._foreach_mul(ps, most)), sent, gradient, feedback.residual)
