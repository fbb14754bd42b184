"""ScaleCom."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.untouched import untouched
from gradwire.memory import LowPass
from gradwire.methods.method import Worker
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.methods.topk import LocalTopK
from gradwire.wire.requests import AllReduceMean, Broadcast, Synchronization


@register("scalecom")
@dataclass(frozen=True, kw_only=True)
class ScaleCom(LocalTopK):
    """Cyclic local top-k: one worker a step, in turns, chooses the coordinates of all, so that values all-reduce.

    The leader of step t is worker ``t mod n``; the top-k of its compensated gradient is broadcast, and everybody's
    compensated values there are averaged: whatever n, k values and k indices travel. The paper's filter is
    ``memory=gradwire.memory.LowPass(share=beta, reset=0)``; ``"residual"``, which is ``beta = 1``, loses nothing.

    Leader, filter and ``beta = 0.1``, which the paper has for its large batches, agree with public notes on its text
    and with third-party code; the text itself was not at hand. It also describes a chunk-wise choice,
    ``granularity="block:N"`` with ``ratio=1/N`` here.
    """

    citation = "Chen et al. 2020, arXiv:2104.11125"
    published = Published(
        "A plain residual loses nothing; the filter is for large batches. The paper chooses in chunks, "
        '`granularity="block:N", ratio=1/N`.',
        {"memory": LowPass(share=0.1, reset=0)},
    )
    routes = ("allreduce",)
    memories = ("none", "residual", "momentum", "ef21", "lowpass")

    def synchronize(self, gradient: Tensor, state: Worker, step: int) -> Synchronization:
        """Two rounds: the leader's indices, then everybody's values there."""
        context, feedback, block = state.context, state.feedback, state.context.block
        coding, select = self.coding(), self.select()
        leader, counts = step % context.world_size, select.counts(block)
        positions = torch.empty(int(counts.sum()), dtype=torch.int64, device=gradient.device)
        values = torch.empty(positions.shape, dtype=torch.float32, device=gradient.device)
        payload = torch.zeros(coding.size(len(positions), block.positions), dtype=torch.uint8, device=gradient.device)

        admitted = feedback.before_encode(block, gradient)
        if context.rank == leader:
            select.select(block, admitted, feedback, counts, positions, values)
            with untouched(positions, "positions", coding):
                coding.encode(positions, block.positions, payload)
            finite = values.isfinite().all()
        else:
            _, finite = feedback.compensate(block, admitted)
        payload = yield Broadcast(payload, leader)

        coding.decode(payload, block.positions, positions)
        kernels.gather(block, feedback.buffer(admitted), positions, values)
        mean = yield AllReduceMean(torch.where(finite, values, torch.nan))

        if feedback.residual is not None:
            values.masked_fill_(~mean.isfinite(), torch.nan)
            kernels.subtract(block, feedback.residual, positions, values)
        feedback.after_encode(block, admitted)
        kernels.scatter_sum(block, positions[None], mean[None], gradient, 1.0)
        feedback.after_decode(block, gradient)
