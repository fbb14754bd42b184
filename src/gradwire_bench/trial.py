"""One training by several workers in this process: a method, an optimizer, a learning rate, a seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.layout import flat_slots
from gradwire.local import LocalWorld
from gradwire_bench.contenders import DDP, Contender
from gradwire_bench.data import Dataset, DataSource
from gradwire_bench.tasks import Task
from gradwire_bench.worker import fingerprint
from gradwire_bench.workloads import WORKLOADS, Name, Workload, bits

OptimizerName = Literal["sgd", "momentum", "nesterov", "adamw"]

WARM_UP_SHARE = 0.2
"""Share of the steps over which the learning rate rises; then it falls along a cosine."""

STEPS = {"image": 800, "gpt": 1500, "language": 400}
"""Steps of a training of the recipes."""


@dataclass(frozen=True)
class Trial:
    """What one training was.

    Attributes:
        workload: The task; its small model.
        optimizer: What takes the averages for gradients: ``"momentum"`` is SGD with momentum 0.9, ``"nesterov"``
            with Nesterov's.
        workers: Number of workers.
        method: As on the command line; ``"ddp"`` for averages that are not compressed.
        learning_rate: At its peak.
        seed: Of the model's start and of the order of the samples.
    """

    workload: Name
    optimizer: OptimizerName
    workers: int
    method: str
    learning_rate: float
    seed: int


@dataclass(frozen=True)
class Result:
    """What came out of a training.

    Attributes:
        accuracy: Share of the test samples that were answered rightly.
        loss: Cross entropy on the test samples, in bits; infinite where it is not finite.
        sent_bytes: Bytes a worker and step handed over to be sent.
        dense_bytes: Bytes a worker and step of a dense ring all-reduce.
        parameters: Digest of the model's bits at the end; empty where training ended before.
    """

    accuracy: float
    loss: float
    sent_bytes: float
    dense_bytes: float
    parameters: str = ""


def base_rate(workload: Workload, optimizer: OptimizerName) -> float:
    """The learning rate that dense averages begin with; a momentum of 0.9 makes a step ten times as long."""
    if optimizer == "adamw":
        return workload.adam_rate
    return workload.learning_rate if optimizer == "sgd" else workload.learning_rate / 10


def run(
    trial: Trial,
    steps: int,
    on_step: Callable[[int], object],
    samples: int | None = None,
    dataset: Dataset = "auto",
    batch: int = 0,
) -> Result:
    """Trains; all workers share one model, since every average has the same bits on all of them.

    Args:
        trial: What to train.
        steps: Number of steps.
        on_step: Called with the number of steps done.
        samples: Test samples it is judged by; all if None.
        dataset: The images.
        batch: Samples a worker and step; 0 for the workload's own.
    """
    workload = WORKLOADS[trial.workload]
    source = workload.locate(dataset)
    task = _task(workload, source, trial.workers * (batch or workload.batch), trial.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trial.seed)
        net = workload.model(source, small=True)
    averages = _Averages(net, trial)
    optimizer = optimizer_of(trial.optimizer, net, trial.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, trial.learning_rate, total_steps=steps, pct_start=WARM_UP_SHARE, cycle_momentum=False
    )
    for step, (inputs, wanted) in enumerate(islice(task.batches(), steps), start=1):
        losses = averages.take(inputs, wanted)
        optimizer.step()
        schedule.step()
        on_step(step)
        if not math.isfinite(losses):
            return Result(0.0, math.inf, averages.sent_bytes / step, averages.dense_bytes)
    net.eval()
    end = fingerprint(net)
    score = task.score(net, samples)
    loss = bits(score.nats / score.seen)
    return Result(
        score.correct / score.seen,
        loss if math.isfinite(loss) else math.inf,
        averages.sent_bytes / steps,
        averages.dense_bytes,
        end,
    )


@cache
def _task(workload: Workload, source: DataSource, batch: int, seed: int) -> Task:
    """All workers' share at once."""
    return workload.task(source, rank=0, world_size=1, batch=batch, seed=seed)


def optimizer_of(name: OptimizerName, net: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """What takes the averages for gradients."""
    if name == "adamw":
        return torch.optim.AdamW(net.parameters(), learning_rate)
    momentum = 0.0 if name == "sgd" else 0.9
    return torch.optim.SGD(net.parameters(), learning_rate, momentum=momentum, nesterov=name == "nesterov")


class _Averages:
    """Each worker's gradient of its part of a batch, averaged into the parameters' ``grad``."""

    def __init__(self, net: nn.Module, trial: Trial) -> None:
        self._net, self._workers = net, trial.workers
        self._parameters = list(net.parameters())
        slots = flat_slots([(name, tuple(each.shape)) for name, each in net.named_parameters()])
        numel = slots[-1].stop
        self._gradients = [torch.zeros(numel) for _ in range(trial.workers)]
        self._views = [[flat[slot.offset : slot.stop].view(slot.shape) for slot in slots] for flat in self._gradients]
        self.dense_bytes = 2 * (trial.workers - 1) / trial.workers * 4 * numel
        self.sent_bytes = 0.0
        contender = Contender.parse(trial.method)
        self._world: LocalWorld | None = None
        if contender.name != DDP:
            made = contender.configuration(trial.seed)
            self._world = LocalWorld(made, slots, trial.workers)

    def take(self, inputs: Tensor, wanted: Tensor) -> float:
        """Leaves the average of a batch in ``grad``, and returns the mean loss."""
        total = 0.0
        each = len(wanted) // len(inputs)  # answers a sample
        for rank, views in enumerate(self._views):
            self._net.zero_grad()
            mine = wanted.view(len(inputs), each)[rank :: self._workers].flatten()
            loss = F.cross_entropy(self._net(inputs[rank :: self._workers]), mine)
            torch.autograd.backward(loss)
            total += loss.item() / self._workers
            for view, parameter in zip(views, self._parameters, strict=True):
                if parameter.grad is not None:
                    view.copy_(parameter.grad)
        if self._world is None:
            for gradient in self._gradients[1:]:
                self._gradients[0] += gradient
            self._gradients[0] /= self._workers
            self.sent_bytes += self.dense_bytes
        else:
            self.sent_bytes += self._world.average(self._gradients).sent_bytes
        for view, parameter in zip(self._views[0], self._parameters, strict=True):
            parameter.grad = view
        return total
