"""ACP-SGD."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codecs.lowrank import (
    Factors,
    Matrices,
    check_rank,
    group,
    orthonormal,
    project_columns,
    project_rows,
    remember,
    renewed,
    room,
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
    p: Factors
    q: Factors
    starts: tuple[Factors, Factors]


@register("acpsgd")
@dataclass(frozen=True, kw_only=True)
class ACPSGD(Factorised):
    """Power iteration that alternates between the two factors, in one all-reduce a step.

    Even steps: ``Q`` is orthonormalised, ``P = M Q`` averaged. Odd steps: ``P`` is orthonormalised, ``Q = M^T P``
    averaged. Each step's average ``P Q^T`` is one half of a PowerSGD step, at half its bytes and half its flops.

    Attributes:
        rank: Rank of the average, at least 1; the paper uses 4 for CNNs and 32 for BERT.
        bits: Of a factor's value on the wire: 32, or 16 for bfloat16. Then the residual is what the average leaves, so
            that it makes up for what is rounded.
    """

    citation = "Zhang et al. 2023, Evaluation and Optimization of Gradient Compression, arXiv:2306.08881"
    published = Published(
        "The paper takes rank 32 for BERT. A row of a factor that is all zero begins anew here, or a matrix that was "
        "zero in a step might never be sent again."
    )
    wire_bits = "bits * rank * max(n, m)"

    rank: int = 4
    bits: int = 32

    def __post_init__(self) -> None:
        check_rank(self.rank, self.bits)

    def init(self, context: Context) -> _State:
        """Groups matrices and starts both factors where none are kept."""
        groups = group(context.block)
        store, seed = context.store, context.seed
        of_p = [(each, store, "p", each.rank(self.rank), each.n, seed) for each in groups]
        of_q = [(each, store, "q", each.rank(self.rank), each.m, seed) for each in groups]
        p, q = ([Matrices.factor(*each) for each in of_one] for of_one in (of_p, of_q))
        starts = [Matrices.start(*each) for each in of_p], [Matrices.start(*each) for each in of_q]
        return _State(context.feedback(), groups, p, q, starts)

    def synchronize(self, gradient: Tensor, state: _State, step: int) -> Synchronization:
        """One round. The residual is what this worker's own factor leaves, or the average, where that is rounded."""
        even, exact, groups = step % 2 == 0, self.bits == 32, state.groups
        project = project_rows if even else project_columns
        units = orthonormal(renewed(*((state.q, state.starts[1]) if even else (state.p, state.starts[0]))))
        most = [room(unit.shape[2]) for unit in units]
        fixed, bases = list(torch._foreach_div(units, most)), list(torch._foreach_mul(units, most))
        own = project(groups, state.feedback.source(gradient), fixed, bases if exact else None)
        requests: list[Request] = [AllReduceMean(written(factor, self.bits)) for factor in own]
        means = [mean.float() for mean in (yield requests)]

        remember(state.p if even else state.q, means)
        p, q = (means, bases) if even else (bases, means)
        write_products(groups, p, q, gradient, None if exact else state.feedback.residual)
