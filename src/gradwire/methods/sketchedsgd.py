"""Sketched-SGD."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.select import counts_for
from gradwire.codecs.select.selector import check_ratio
from gradwire.codecs.sketch import CountSketch
from gradwire.deferred import known, placed
from gradwire.errors import ConfigurationError
from gradwire.layout import Block, Granularity, Int64Array, flat_slots
from gradwire.memory import Feedback
from gradwire.methods.method import Context, Method
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.wire.requests import AllReduceMean, Synchronization


@dataclass(frozen=True, eq=False)
class _State:
    context: Context
    feedback: Feedback
    counts: Int64Array
    candidates: Int64Array
    chosen: Block


@register("sketchedsgd")
@dataclass(frozen=True, kw_only=True)
class SketchedSGD(Method):
    """The heaviest coordinates of the average, found in an averaged count sketch, then sent exactly.

    Workers average sketches of what they have accumulated. All see the same largest estimates, average the exact values
    there, and keep the k largest averages. No index travels, and the bytes do not grow with the number of workers. The
    usual memory is the paper's: momentum, and what was accumulated, both zeroed where sent.

    Verified against the authors' code (dhroth/sketchedsgd): momentum, accumulation, the second round, zeroing. Unlike
    there, hashes change with the step, and 16 neighbours lie side by side in a row of the sketch, which keeps the
    chance that any two others meet. The paper sketches the whole model at once: ``granularity="model"``.

    Attributes:
        ratio: k as a share of a segment's elements, in (0, 1].
        rows: Rows of a sketch, odd.
        columns: Columns of a sketch as a multiple of k; a sketch has at least 16.
        candidates: Coordinates whose exact values are averaged as a multiple of k, at least 1: the paper's P.
    """

    citation = "Ivkin et al. 2019, arXiv:1903.04488"
    published = Published(
        "A sketch for every bucket lets the first travel before the last gradient is there. In the authors' code there "
        "is weight decay in what is sketched; with plain SGD make it `1 / (1 - momentum)` times as large.",
        {"granularity": "model"},
    )
    routes = ("allreduce",)
    granularities = ("bucket", "model", "layer", "block")
    memory = "dgc"
    memories = ("dgc", "residual", "momentum", "none")
    bias = "contractive"
    selects = True
    wire_bits = "32 * (rows * max(16, ceil(columns * k)) + min(d, candidates * k))"

    ratio: float = 0.0005
    rows: int = 5
    columns: float = 10.0
    candidates: int = 8

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        self._sketch()
        if not (isinstance(self.candidates, int) and self.candidates >= 1):
            raise ConfigurationError(
                f"candidates={self.candidates!r} is out of range; choose a whole number >= 1, usually 8"
            )

    def _sketch(self) -> CountSketch:
        return CountSketch(self.rows, self.columns)

    def error_bound(self, numel: int) -> float:
        """Wherever the sketch points, exact values are sent."""
        return 1.0

    def init(self, context: Context) -> _State:
        """Sets up the memory."""
        counts = counts_for(context.block, self.ratio)
        numels = context.block.segment_numels
        candidates = np.minimum(min(self.candidates, int(numels.max())) * counts, numels)
        slots = flat_slots([(str(segment), (int(count),)) for segment, count in enumerate(candidates)])
        return _State(context, context.feedback(), counts, candidates, Block.cut(slots, Granularity("layer")))

    def synchronize(self, gradient: Tensor, state: _State, step: int) -> Synchronization:
        """The two rounds. Estimates are written over the gradient where the memory has taken it in."""
        sketch, block = self._sketch(), state.context.block
        feedback, counts, key = state.feedback, state.counts, state.context.shared_key(step)
        admitted = feedback.before_encode(block, gradient)
        values, finite = feedback.compensate(block, admitted)
        table = sketch.write(block, values, counts, key)
        if not known(finite):
            table.masked_fill_(~finite, torch.nan)
        table = yield AllReduceMean(table)

        estimates = torch.empty_like(gradient) if values is gradient else gradient
        sketch.estimate(block, table, counts, key, estimates)
        candidates, heavy = _largest(block, estimates, state.candidates)
        exact = torch.empty_like(heavy)
        kernels.gather(block, values, candidates, exact)
        exact.masked_fill_(heavy.isnan(), torch.nan)
        mean = yield AllReduceMean(exact.clone())

        places, heaviest = _largest(state.chosen, mean, counts)
        index = places - placed(np.repeat(state.chosen.runs[:, 2] - state.chosen.runs[:, 0], counts), places.device)
        positions, sent = candidates[index], exact[index].masked_fill_(heaviest.isnan(), torch.nan)
        feedback.masked(block, positions, torch.where(sent.isfinite(), sent, torch.nan))
        if feedback.residual is not None:
            kernels.subtract(block, feedback.residual, positions, sent)
        feedback.after_encode(block, admitted)
        kernels.scatter_sum(block, positions[None], heaviest[None], gradient, 1.0)
        feedback.after_decode(block, gradient)


def _largest(block: Block, values: Tensor, counts: Int64Array) -> tuple[Tensor, Tensor]:
    """Positions and values of the ``counts[s]`` largest magnitudes of each segment."""
    positions = torch.empty(int(counts.sum()), dtype=torch.int64, device=values.device)
    largest = torch.empty(positions.shape, dtype=torch.float32, device=values.device)
    kernels.topk_select(block, kernels.Compensated(values), counts, positions, largest)
    return positions, largest
