"""One rank of ``gradwire bench train``: trains the same model on the same batches with each contender in turn."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire_bench import placement, resident
from gradwire_bench.contenders import Averaged, Contender
from gradwire_bench.data import DataSource
from gradwire_bench.optimizers import base_rate, one_cycle, optimizer_of
from gradwire_bench.placement import BACKENDS, FromHost
from gradwire_bench.settings import learning_rate
from gradwire_bench.tasks import Share, Task
from gradwire_bench.worker import attempted, emit, fingerprint, interface_sent_bytes, mean_over_ranks, process_group
from gradwire_bench.workloads import WORKLOADS, Workload

EVALUATION_STEPS = 10
"""Steps from one point of the accuracy curve to the next."""

EVALUATION_SAMPLES = 1_000
"""Test samples of one point of the accuracy curve; the final accuracy uses all."""

JUDGED_STEPS, GLANCE_SAMPLES = 20, 100
"""A shorter training is for its times, and ends with so many test samples."""

COLLECTIVE_TIMEOUT = 120.0
"""Seconds after which a collective that some rank does not join fails."""


def train(number: int, method: str, job: dict[str, Any], workload: Workload, task: Task) -> None:
    """Trains with one contender and tells its progress and result; every rank calls it at the same time.

    Args:
        number: The contender's place in the job.
        method: The contender.
        job: The parent's wishes: ``steps``, ``seed``, ``device``, ``shaped`` (whether the worker's interface is its
            own).
        workload: The model and its settings.
        task: This rank's share of the data.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(job["seed"])
    device = placement.place(job["device"], rank)
    net = workload.model(DataSource.of(job["source"])).to(device)
    contender = Contender.parse(method)
    averaged = attempted(
        number, lambda: contender.wrap(net, dist.new_group(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT)))
    )
    if averaged is None:
        return
    dense_bytes = sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())
    sent_before, stages_before = averaged.sent_bytes(), averaged.stages()
    measurable = resident.reset_peak()
    peak = peak_rate(contender, workload, job)
    steps = attempted(number, lambda: list(_steps(number, averaged, peak, net, task, job, rank, device)))
    if steps is None:
        return
    interface = mean_over_ranks(sum(step.interface_bytes for step in steps)) / len(steps) if job["shaped"] else None
    sent = averaged.sent_bytes()
    metered = None
    if sent is not None and sent_before is not None:
        metered = mean_over_ranks(sent - sent_before) / len(steps)
    phases = {
        name: statistics.median(getattr(step, name) for step in steps) for name in ("forward", "backward", "update")
    }
    for stage, total in averaged.stages().items():
        phases[stage] = (total - stages_before[stage]) / len(steps)
    peak_bytes = resident.peak() if measurable else None
    end = fingerprint(net)
    accuracy = _accuracy(net, task, None if job["steps"] >= JUDGED_STEPS else GLANCE_SAMPLES, device)
    averaged.close()
    if rank == 0:
        emit(
            "result",
            row=number,
            step_seconds=[step.seconds for step in steps],
            metered_bytes=metered,
            interface_bytes=interface,
            dense_bytes=2 * (world_size - 1) * dense_bytes / world_size,
            accuracy=accuracy,
            losses=[step.loss for step in steps],
            phases=phases,
            peak_bytes=peak_bytes,
            parameters=end,
        )


class _Step(NamedTuple):
    forward: float
    backward: float
    update: float
    loss: float
    interface_bytes: int

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.update


def peak_rate(contender: Contender, workload: Workload, job: dict[str, Any]) -> float:
    """A contender's learning rate at its highest."""
    own = learning_rate(contender, workload) / workload.learning_rate
    return float(job["rate"]) * own * base_rate(workload, job["optimizer"])


def _steps(
    number: int,
    averaged: Averaged,
    peak: float,
    net: nn.Module,
    task: Task,
    job: dict[str, Any],
    rank: int,
    device: torch.device,
) -> Iterator[_Step]:
    """The training loop; evaluations count neither in a step's seconds nor in its bytes."""
    steps, shaped = job["steps"], job["shaped"]
    optimizer = optimizer_of(job["optimizer"], net, peak)
    schedule = one_cycle(optimizer, peak, steps)
    batches = task.batches()
    elapsed = 0.0
    dist.barrier()
    for step in range(1, steps + 1):
        sent_before = interface_sent_bytes() if shaped else 0
        begin = time.perf_counter()
        inputs, labels = next(batches)
        optimizer.zero_grad()
        loss: Tensor = F.cross_entropy(averaged.model(inputs.to(device)), labels.to(device))
        placement.wait(device)
        forward = time.perf_counter()
        torch.autograd.backward(loss)
        placement.wait(device)
        backward = time.perf_counter()
        optimizer.step()
        schedule.step()
        placement.wait(device)
        end = time.perf_counter()
        elapsed += end - begin
        sent = interface_sent_bytes() - sent_before if shaped else 0
        accuracy = None
        if samples := evaluated(step, steps):
            accuracy = _accuracy(net, task, samples, device)
        if rank == 0:
            emit("step", row=number, step=step, elapsed=elapsed, loss=loss.item(), accuracy=accuracy)
        yield _Step(forward - begin, backward - forward, end - backward, loss.item(), sent)


def evaluated(step: int, steps: int) -> int:
    """Test samples of the accuracy curve's point after a step; 0 where it has none."""
    judged = steps >= JUDGED_STEPS
    if step != steps and not (judged and step % EVALUATION_STEPS == 0):
        return 0
    return EVALUATION_SAMPLES if judged else GLANCE_SAMPLES


def _accuracy(net: nn.Module, task: Task, limit: int | None, device: torch.device) -> float:
    """Share of test samples answered rightly, with rank 0's running statistics."""
    for buffer in net.buffers():
        dist.broadcast(buffer, src=0)
    net.eval()
    share = share_right(FromHost(net, device), task, limit)
    net.train()
    return share


def share_right(net: nn.Module, task: Task, limit: int | None) -> float:
    """Share of test samples answered rightly; each rank looks at its part of them."""
    score = task.score(net, limit)
    counts = torch.tensor([score.correct, score.seen], dtype=torch.float64)
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def main(train: Callable[[int, str, dict[str, Any], Workload, Task], None] = train) -> None:
    """Runs the job given as JSON on the command line, each contender by ``train``."""
    job = json.loads(sys.argv[1])
    source = DataSource.of(job["source"])
    workload = WORKLOADS[job["workload"]]
    with process_group(2 * COLLECTIVE_TIMEOUT, BACKENDS[job["backend"]]) as (rank, world_size):
        task = workload.task(source, Share(job["batch"], job["seed"], rank, world_size))
        for number, method in enumerate(job["methods"]):
            train(number, method, job, workload, task)


if __name__ == "__main__":
    main()
