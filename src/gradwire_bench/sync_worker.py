"""One rank of ``gradwire bench sync``: averages a prepared gradient through DDP, contenders in turn, and times it."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire_bench import shapes
from gradwire_bench.contenders import Averaged, Contender
from gradwire_bench.worker import agree, emit, interface_sent_bytes, mean_over_ranks, process_group, reason

WARM_UP_STEPS = 3
"""DDP rebuilds its buckets after the first step, and PyTorch's hook compresses from the third on."""

LEAST_STEPS = 3
"""Timed steps of every contender, however slow."""


@dataclass
class Lane:
    """One contender's state in the race.

    Attributes:
        number: Its place in the job.
        averaged: Its model; ``None`` once it has failed.
        seconds: The slowest rank's time of each timed step.
        interface_bytes: What this rank's interface sent during the timed steps.
        sent_before: The meter's bytes when timing began.
        stages_before: The wire thread's seconds by stage when timing began.
    """

    number: int
    averaged: Averaged | None
    seconds: list[float] = field(default_factory=list)
    interface_bytes: int = 0
    sent_before: int | None = None
    stages_before: dict[str, float] = field(default_factory=dict)

    def wants_more(self, steps: int, budget: float) -> bool:
        """Whether to go on; every rank answers alike, since all know the same times."""
        if self.averaged is None or len(self.seconds) >= steps:
            return False
        return len(self.seconds) < LEAST_STEPS or sum(self.seconds) + statistics.median(self.seconds) <= budget


class Race:
    """All contenders alive at once, stepping in turn over the same gradients.

    Args:
        job: The parent's wishes: ``shapes``, ``methods``, ``steps``, ``budget`` (seconds of timed steps for each
            contender), ``timeout`` (seconds a collective may take), ``shaped`` (whether the worker's interface is its
            own).
        rank: This rank.
        made: Makes a contender's model, which gives a step's loss; in place of ``shapes``.
    """

    def __init__(self, job: dict[str, Any], rank: int, made: Callable[[], nn.Module] | None = None) -> None:
        self._rank, self._steps, self._budget = rank, job["steps"], job["budget"]
        self._shaped, self._timeout = job["shaped"], timedelta(seconds=job["timeout"])
        self._made = made or _shaped(job["shapes"], rank)
        self._clock = 0
        self._lanes = [self._enter(number, method) for number, method in enumerate(job["methods"])]

    def run(self) -> None:
        """Warms every contender up, times them in turn, and tells the results."""
        for _ in range(WARM_UP_STEPS):
            for lane in self._lanes:
                self._step(lane, timed=False)
        for lane in self._lanes:
            while lane.averaged is not None and lane.averaged.undecided:
                self._step(lane, timed=False)
        for lane in self._lanes:
            if lane.averaged is not None:
                lane.sent_before, lane.stages_before = lane.averaged.sent_bytes(), lane.averaged.stages()
        while any(lane.wants_more(self._steps, self._budget) for lane in self._lanes):
            for lane in self._lanes:
                if lane.wants_more(self._steps, self._budget):
                    self._step(lane, timed=True)
        for lane in self._lanes:
            self._report(lane)
            if lane.averaged is not None:
                lane.averaged.close()

    def _enter(self, number: int, method: str) -> Lane:
        """Builds a contender on a group of its own, so that one that hangs leaves the others' connections whole."""
        averaged, error = None, None
        try:
            group = dist.new_group(timeout=self._timeout)
            averaged = Contender.parse(method).wrap(self._made(), group, init_sync=False)
        except Exception as caught:  # whatever stops a contender belongs in its row
            error = caught
        lane = Lane(number, averaged)
        self._settle(lane, error)
        return lane

    def _step(self, lane: Lane, *, timed: bool) -> None:
        if lane.averaged is None:
            return
        model = lane.averaged.model
        model.zero_grad(set_to_none=True)
        self._clock += 1
        before = interface_sent_bytes() if self._shaped else 0
        seconds, error = 0.0, None
        loss = model(self._clock)
        dist.barrier()
        try:
            start = time.perf_counter()
            loss.backward()
            seconds = time.perf_counter() - start
        except Exception as caught:  # whatever stops a contender belongs in its row
            error = caught
        slowest = self._settle(lane, error, seconds)
        if timed and lane.averaged is not None:
            lane.seconds.append(slowest)
            if self._shaped:
                lane.interface_bytes += interface_sent_bytes() - before
        if self._rank == 0:
            emit("step", row=lane.number, timed=timed, seconds=slowest)

    def _settle(self, lane: Lane, error: Exception | None, seconds: float = 0.0) -> float:
        """Agrees on the slowest time; a contender that failed anywhere is out everywhere."""
        if error is not None:
            emit("failed", row=lane.number, reason=reason(error))
        slowest, failed = agree(seconds, failed=error is not None)
        if failed:
            lane.averaged = None
        return slowest

    def _report(self, lane: Lane) -> None:
        if lane.averaged is None:
            return
        steps = len(lane.seconds)
        sent = lane.averaged.sent_bytes()
        metered = None
        if sent is not None and lane.sent_before is not None:
            metered = mean_over_ranks((sent - lane.sent_before) / steps)
        interface = mean_over_ranks(lane.interface_bytes / steps) if self._shaped else None
        stages = {stage: (total - lane.stages_before[stage]) / steps for stage, total in lane.averaged.stages().items()}
        if self._rank == 0:
            emit(
                "result",
                row=lane.number,
                seconds=lane.seconds,
                metered_bytes=metered,
                interface_bytes=interface,
                stages=stages,
            )


def _shaped(name: str, rank: int) -> Callable[[], nn.Module]:
    """Models of known shapes without computation, which share memory: so many can be alive at once."""
    parameters = shapes.get(name)
    numel = shapes.numel(parameters)
    return partial(shapes.ShapedModel, parameters, torch.zeros(numel), shapes.Noise(numel, seed=rank))


def main() -> None:
    """Runs the job given as JSON on the command line."""
    job = json.loads(sys.argv[1])
    with process_group(timeout=2 * job["timeout"]) as (rank, _):
        Race(job, rank).run()


if __name__ == "__main__":
    main()
