"""GreedyLore."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.lowrank import (
    Factors,
    Matrices,
    group,
    project_columns,
    project_rows,
    room,
    scaled_rows,
    write_products,
)
from gradwire.codecs.transform import principal_components
from gradwire.errors import ConfigurationError
from gradwire.memory import Feedback, Kind
from gradwire.methods.factorised import Factorised
from gradwire.methods.method import Context
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.randomness import gaussian, key_of, mix64
from gradwire.wire.requests import AllReduceMean, Broadcast, Request, Synchronization

_Products: TypeAlias = Callable[[list[Matrices], kernels.Compensated, Factors], Factors]


@dataclass(eq=False)
class _State:
    """Matrices and what is known of them.

    Attributes:
        wide: Those with at most as many rows as columns.
        tall: The others.
        bases: Of wide, then of tall ones: ``[k, s, s]`` for the shorter side ``s``, a direction a row.
        learnt: Whether there was an average to find a basis of, ``[k]``.
        known: Whether the host knows that there was for all of them.
    """

    context: Context
    feedback: Feedback
    wide: list[Matrices]
    tall: list[Matrices]
    bases: Factors
    learnt: list[Tensor]
    known: bool = False


@register("greedylore")
@dataclass(frozen=True, kw_only=True)
class GreedyLore(Factorised):
    """The directions of a basis in which the average is longest, chosen anew in every step, in two all-reduces.

    Every so many steps the average is dense, and its left singular vectors, all of them, are the basis of a matrix
    ``M`` (of its transpose if it is tall); ranks find them in turn, a matrix each. In the steps between,
    ``U^T (M z)`` of a Gaussian ``z``, averaged, tells how long the average is in each direction; the ``rank`` longest
    are the rows of ``P``, and ``P M``, averaged, is sent.

    Attributes:
        rank: Directions of a matrix that are sent, at least 1; the paper takes 32 for LLaMA.
        refresh: Steps from a dense average to the next, at least 1.
    """

    citation = "Chen et al. 2025, arXiv:2507.08784"
    published = Published(
        "In the paper each direction has a `z` of its own, for which the whole gradient is turned to the basis; here "
        "all share one, a single product with a vector, whose squares have the same mean. What is owed goes with the "
        "next dense average, where the authors' code forgets it. Their code takes the first dense steps by itself "
        "(`start=10`)."
    )
    wire_bits = "32 * (min(rank, n, m) * max(n, m) + min(n, m))"
    learning_bits = "32 * (d + min(n, m)**2)"

    rank: int = 4
    refresh: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.refresh, int) and self.refresh >= 1):
            raise ConfigurationError(f"refresh={self.refresh!r} is out of range; choose a whole number >= 1, as 200")

    def init(self, context: Context) -> _State:
        """Groups matrices, whose bases are at first their axes."""
        groups = group(context.block)
        wide, tall = [each for each in groups if each.n <= each.m], [each for each in groups if each.n > each.m]
        bases, learnt = [], []
        for each in (*wide, *tall):
            names, axes = [slot.name for slot in each.slots], partial(_axes, min(each.n, each.m))
            bases.append(context.store.stacked("basis", names, axes, Kind.SHARED))
            learnt.append(
                context.store.stacked("learnt", names, lambda _: torch.zeros((), dtype=torch.float32), Kind.SHARED)
            )
        return _State(context, context.feedback(), wide, tall, bases, learnt)

    def synchronize(self, gradient: Tensor, state: _State, step: int) -> Synchronization:
        """Two rounds; a dense one and one for the bases every so often, and until there was an average to learn of."""
        state.known = state.known or all(bool(learnt.all()) for learnt in state.learnt)
        if step % self.refresh == 0 or not state.known:
            yield from _learn(gradient, state)
            return
        feedback, groups = state.feedback, [*state.wide, *state.tall]
        probes = _probes(groups, mix64(key_of(state.context.seed, step)), gradient.device)
        own = _each(state, project_rows, project_columns, feedback.source(gradient), probes)
        scores = yield [AllReduceMean(each @ basis.mT) for each, basis in zip(own, state.bases, strict=True)]

        units = [_longest(*each, self.rank) for each in zip(state.bases, scores, strict=True)]
        most = [room(unit.shape[2]) for unit in units]
        fixed, directions = list(torch._foreach_div(units, most)), list(torch._foreach_mul(units, most))
        values = kernels.Compensated(feedback.buffer(gradient))
        own = _each(state, project_columns, project_rows, values, fixed)
        means = yield [AllReduceMean(each) for each in own]

        split = len(state.wide)
        p, q = [*directions[:split], *means[split:]], [*means[:split], *directions[split:]]
        write_products(groups, p, q, gradient, feedback.residual)


def _axes(side: int, _name: str) -> Tensor:
    return torch.eye(side, dtype=torch.float32)


def _each(
    state: _State, of_wide: _Products, of_tall: _Products, source: kernels.Compensated, factors: Factors
) -> Factors:
    """Products of wide matrices in one way and of tall ones in the other."""
    split = len(state.wide)
    wide = of_wide(state.wide, source, factors[:split]) if state.wide else []
    return [*wide, *(of_tall(state.tall, source, factors[split:]) if state.tall else [])]


def _probes(groups: list[Matrices], key: int, device: torch.device) -> Factors:
    """A Gaussian vector along the longer side of each matrix, one for all that are as long."""
    lengths = [max(each.n, each.m) for each in groups]
    drawn = {length: scaled_rows(gaussian(key ^ length, length, device).view(1, 1, -1)) for length in set(lengths)}
    return [drawn[length].repeat(len(each.slots), 1, 1) for length, each in zip(lengths, groups, strict=True)]


def _longest(bases: Tensor, scores: Tensor, rank: int) -> Tensor:
    """The directions ``[k, r, s]`` with the largest scores ``[k, 1, s]``; NaN where scores are not finite."""
    order = scores.abs().argsort(dim=-1, descending=True, stable=True)[:, 0, :rank, None]
    finite = scores.isfinite().all(-1, keepdim=True)
    return torch.where(finite, torch.take_along_dim(bases, order, 1), torch.nan)


def _learn(gradient: Tensor, state: _State) -> Synchronization:
    """A dense average of all that is owed, and the bases that ranks in turn find of it; none of what is not finite."""
    context, feedback = state.context, state.feedback
    values, finite = feedback.compensate(context.block, gradient)
    own = torch.where(finite, values, torch.nan)
    requests: list[Request] = [AllReduceMean(own[slot.offset : slot.stop]) for slot in context.block.slots]
    for slot, mean in zip(context.block.slots, (yield requests), strict=True):
        gradient[slot.offset : slot.stop] = mean
        if feedback.residual is not None:
            feedback.residual[slot.offset : slot.stop].masked_fill_(mean.isfinite().all(), 0.0)
    bases: list[Broadcast] = []
    for matrices, basis, learnt in zip([*state.wide, *state.tall], state.bases, state.learnt, strict=True):
        for slot, mine, known in zip(matrices.slots, basis, learnt, strict=True):
            mean = gradient[slot.offset : slot.stop].view(matrices.n, matrices.m)
            finder = len(bases) % context.world_size
            if context.rank == finder:
                mine.copy_(_singular_vectors(mean, mine))
            known.copy_(known.logical_or(mean.isfinite().all()))
            bases.append(Broadcast(mine, finder))
    for each, sent in zip(bases, (yield [*bases]), strict=True):
        each.payload.copy_(sent)


def _singular_vectors(matrix: Tensor, former: Tensor) -> Tensor:
    """Those along the shorter side, a row each, the largest first; the former ones of zeros and of what is not finite.

    They are found in double precision as eigenvectors, which takes a core 0.1 s for a side of 768 and 4 s for 2,048.
    """
    largest = matrix.abs().max()
    usable = largest.isfinite() & (largest > 0)
    unit = torch.where(usable, matrix / largest, 0.0).double()
    moment = unit @ unit.T if len(unit) <= unit.shape[1] else unit.T @ unit
    return torch.where(usable, principal_components(moment, len(moment)), former)
