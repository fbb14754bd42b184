"""PowerSGD."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.lowrank import Matrices, check_rank, gains, group, orthonormal_rows, subtract_products, write_products
from gradwire.memory import Feedback
from gradwire.methods.method import Method, Site
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
    """

    citation = "Vogels et al. 2019, arXiv:1905.13727"
    routes = ("allreduce",)
    granularities = ("layer",)
    memory = "residual"

    rank: int = 4

    def __post_init__(self) -> None:
        check_rank(self.rank)

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Matrices that are larger than their factors."""
        return gains(shape, self.rank)

    def begin(self, site: Site) -> _State:
        """Groups matrices and starts ``Q`` where none is kept."""
        groups = group(site.block)
        q = [each.factor(site.store, "q", each.rank(self.rank), each.m, site.seed) for each in groups]
        return _State(site.feedback(), groups, q)

    def synchronize(self, gradient: Tensor, state: _State, step: int) -> Synchronization:
        """The two rounds."""
        compensated = state.feedback.buffer(gradient)
        requests: list[Request] = []
        for matrices, q in zip(state.groups, state.q, strict=True):
            p = q.new_empty(len(q), q.shape[1], matrices.n)
            for block, matrix, p_row, q_row in zip(matrices.blocks, matrices.views(compensated), p, q, strict=True):
                _, finite = state.feedback.compensate(block, gradient)
                torch.mm(q_row, matrix.mT, out=p_row)
                if not finite:
                    p_row.fill_(torch.nan)
            requests.append(AllReduceMean(p))
        ps = [orthonormal_rows(mean) for mean in (yield requests)]

        requests = []
        for matrices, p in zip(state.groups, ps, strict=True):
            q = p.new_empty(len(p), p.shape[1], matrices.m)
            for matrix, p_row, q_row in zip(matrices.views(compensated), p, q, strict=True):
                torch.mm(p_row, matrix, out=q_row)
            requests.append(AllReduceMean(q))
        qs = yield requests

        for matrices, p, q, kept in zip(state.groups, ps, qs, state.q, strict=True):
            if q.isfinite().all():
                kept.copy_(q)
                if state.feedback.residual is not None:
                    subtract_products(matrices.views(state.feedback.residual), p, q)
            write_products(matrices.views(gradient), p, q)
