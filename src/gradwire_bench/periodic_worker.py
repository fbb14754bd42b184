"""One rank of ``gradwire bench periodic``: trains, or times averages, as the job on the command line says."""

from __future__ import annotations

import json
import statistics
import sys
import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import gradwire
from gradwire_bench import shapes
from gradwire_bench.contenders import Averaged, Contender
from gradwire_bench.data import DataSource
from gradwire_bench.nets import ByteNet
from gradwire_bench.optimizers import OptimizerName, one_cycle, optimizer_of
from gradwire_bench.periodic_plans import Plan, Run
from gradwire_bench.tasks import Score, Share, Task
from gradwire_bench.worker import (
    agree,
    attempted,
    emit,
    fingerprint,
    interface_sent_bytes,
    mean_over_ranks,
    process_group,
)
from gradwire_bench.workloads import WORKLOADS, Workload

TOLD_EVERY = 10
"""Steps from one line to the parent to the next."""

NEVER = 1 << 40
"""A period that no benchmark reaches the end of."""

COLLECTIVE_TIMEOUT = 300.0
"""Seconds after which a collective that some rank does not join fails."""


class Trainer:
    """Trains one model after another, each as its run says.

    Args:
        job: The parent's wishes: ``workload``, ``source``, ``batch``, ``optimizer``, ``large``,
            ``test_samples``, ``shaped`` (whether the worker's interface is its own), ``runs``.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._workload: Workload = WORKLOADS[job["workload"]]
        self._source = DataSource.of(job["source"])
        self._tasks: dict[int, Task] = {}

    def run(self) -> None:
        """Does every training and tells its result; every rank calls it at the same time."""
        for number, fields in enumerate(self._job["runs"]):
            run = Run(**{**fields, "plan": Plan(**fields["plan"])})
            result = attempted(number, partial(self._train, number, run))
            if result is not None and dist.get_rank() == 0:
                emit("result", row=number, **result)

    def _task(self, seed: int) -> Task:
        if seed not in self._tasks:
            share = Share(self._job["batch"], seed, dist.get_rank(), dist.get_world_size())
            self._tasks = {seed: self._workload.task(self._source, share)}
        return self._tasks[seed]

    def _train(self, number: int, run: Run) -> dict[str, Any]:
        torch.manual_seed(run.seed)
        net = self._workload.model(self._source, small=not self._job["large"])
        optimizer = optimizer_of(self._job["optimizer"], net, run.learning_rate)
        group = dist.new_group(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT))
        averaged = _averaged(net, optimizer, run.plan, group)
        try:
            schedule = one_cycle(optimizer, run.learning_rate, run.steps + 1)
            task = self._task(run.seed)
            batches = task.batches()
            in_optimizer = 0.0
            interface_before = interface_sent_bytes() if self._job["shaped"] else 0
            dist.barrier()
            begin = time.perf_counter()
            for step in range(1, run.steps + 1):
                inputs, wanted = next(batches)
                optimizer.zero_grad()
                loss: Tensor = F.cross_entropy(averaged.model(inputs), wanted)
                torch.autograd.backward(loss)
                stepping = time.perf_counter()
                optimizer.step()
                in_optimizer += time.perf_counter() - stepping
                schedule.step()
                if dist.get_rank() == 0 and step % TOLD_EVERY == 0:
                    emit("step", row=number, step=step)
            ending = 0.0
            if run.plan.every <= run.steps:
                stepping = time.perf_counter()
                averaged.finish()
                ending = time.perf_counter() - stepping
            seconds, _ = agree(time.perf_counter() - begin)
            interface = None
            if self._job["shaped"]:
                interface = mean_over_ranks(interface_sent_bytes() - interface_before) / run.steps
            metered = mean_over_ranks(averaged.sent_bytes() or 0) / run.steps
            score = _score(net, task, self._job["test_samples"])
        finally:
            averaged.close()
        world_size = dist.get_world_size()
        dense_bytes = sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())
        return {
            "steps_done": run.steps,
            "loss": score.nats / score.seen,
            "accuracy": score.correct / score.seen,
            "dense_bytes": 2 * (world_size - 1) * dense_bytes / world_size,
            "metered_bytes": metered,
            "interface_bytes": interface,
            "seconds": seconds,
            "optimizer_seconds": mean_over_ranks(in_optimizer + ending),
            "ending_seconds": mean_over_ranks(ending),
            "parameters": fingerprint(net),
        }


def silence(job: dict[str, Any]) -> None:
    """Times an optimizer's steps, bare and with an averager attached that never sends; CPU time of the process.

    Tells the median over rounds for SGD and AdamW. Each round times two optimizers of the same kind in turn, of which
    one has the averager, in half of the rounds the other one: so neither the machine's moods nor where tensors lie make
    a difference.

    Args:
        job: The parent's wishes: ``steps`` of a round, ``rounds``.
    """
    plan, dense = Plan("nothing sent", NEVER), Contender.parse("dense")
    names: tuple[OptimizerName, ...] = ("sgd", "adamw")
    for name in names:
        pair = [_prepared(name), _prepared(name)]
        alone: list[float] = []
        attached: list[float] = []
        for chosen in pair:
            handle = _periodic(*chosen, plan, dense, dist.group.WORLD)
            for _ in range(job["rounds"] // 2):
                for each in pair:
                    (attached if each is chosen else alone).append(_step_seconds(each[1], job["steps"]))
            handle.close()
        if dist.get_rank() == 0:
            emit("silence", optimizer=name, alone=statistics.median(alone), attached=statistics.median(attached))


def _step_seconds(optimizer: torch.optim.Optimizer, steps: int) -> float:
    begin = time.process_time()
    for _ in range(steps):
        optimizer.step()
    return (time.process_time() - begin) / steps


def _prepared(name: OptimizerName) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = ByteNet()
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = optimizer_of(name, net, 1e-3)
    optimizer.step()
    return net, optimizer


def averages(job: dict[str, Any]) -> None:
    """Times averages of a model-shaped change of parameters, one method after another.

    Args:
        job: The parent's wishes: ``shapes``, ``repeats`` and ``seconds``, both of which are reached, ``methods``.
    """
    net = nn.ParameterDict({name.replace(".", "_"): torch.zeros(shape) for name, shape in shapes.get(job["shapes"])})
    for number, method in enumerate(job["methods"]):
        found = attempted(number, partial(_average, job, net, Contender.parse(method)))
        if found is not None and dist.get_rank() == 0:
            emit("result", row=number, seconds=found[0], metered_bytes=found[1])


def _average(job: dict[str, Any], net: nn.ParameterDict, contender: Contender) -> tuple[list[float], float]:
    """Seconds of each average, and bytes of one."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    group = dist.new_group(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT))
    handle = _periodic(net, optimizer, Plan("timed", NEVER), contender, group)
    change = torch.Generator().manual_seed(dist.get_rank())

    def timed() -> float:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=change), alpha=1e-3)
        optimizer.step()  # without gradients, which changes nothing; but there is something to average after it
        dist.barrier()
        begin = time.perf_counter()
        handle.synchronize()
        slowest, _ = agree(time.perf_counter() - begin)
        return slowest

    timed()  # warms up
    before = handle.stats().wire_bytes
    seconds: list[float] = []
    while len(seconds) < job["repeats"] or sum(seconds) < job["seconds"]:
        seconds.append(timed())
    metered = mean_over_ranks(handle.stats().wire_bytes - before) / len(seconds)
    handle.close()
    return seconds, metered


def _averaged(net: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, group: dist.ProcessGroup) -> Averaged:
    """A model and what averages it, as a plan says."""
    contender = Contender.parse(plan.method)
    if plan.every:
        return Averaged(net, _periodic(net, optimizer, plan, contender, group))
    return contender.wrap(net, group) if dist.get_world_size() > 1 else Averaged(net, None)


def _periodic(
    net: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, contender: Contender, group: dist.ProcessGroup | None
) -> gradwire.Periodic:
    options: dict[str, Any] = dict(contender.options)
    if plan.feedback:
        options["memory"] = gradwire.memory.Residual(beta=plan.feedback)
    outer = None
    if plan.outer_rate:

        def outer(parameters: list[Tensor]) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=plan.outer_rate, momentum=0.9, nesterov=True)

    return gradwire.periodic(
        optimizer,
        every=plan.every,
        method=contender.name,
        parameters=net.named_parameters(),
        outer=outer,
        process_group=group,
        fragments=plan.fragments,
        delay=plan.delay,
        **options,
    )


def _score(net: nn.Module, task: Task, samples: int) -> Score:
    """Of so many test samples, each rank looking at its part, with the mean over ranks of the running statistics."""
    for buffer in net.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer.div_(dist.get_world_size())
    net.eval()
    mine = task.score(net, samples)
    net.train()
    total = torch.tensor([mine.correct, mine.seen, mine.nats], dtype=torch.float64)
    dist.all_reduce(total)
    return Score(int(total[0]), int(total[1]), float(total[2]))


def main() -> None:
    """Runs the job given as JSON on the command line."""
    job = json.loads(sys.argv[1])
    with process_group(2 * COLLECTIVE_TIMEOUT):
        match job["kind"]:
            case "train":
                Trainer(job).run()
            case "silence":
                silence(job)
            case "average":
                averages(job)


if __name__ == "__main__":
    main()
