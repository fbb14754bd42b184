"""One training by several workers in this process: a method, an optimizer, a learning rate, a seed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire import SecondMoments
from gradwire.engine.engine import Engine
from gradwire.layout import Slot, flat_slots
from gradwire.local import LocalWorld
from gradwire_bench import placement
from gradwire_bench.contenders import DDP, Contender
from gradwire_bench.data import Dataset, DataSource
from gradwire_bench.optimizers import OptimizerName, one_cycle, optimizer_of
from gradwire_bench.periods import Periods, nesterov
from gradwire_bench.placement import Device, FromHost
from gradwire_bench.tasks import Share, Task
from gradwire_bench.worker import fingerprint
from gradwire_bench.workloads import WORKLOADS, Name, Workload, bits

BUCKETS = 8
"""So many are cut of a small model where a line has one segment for each: as many as DDP forms of some 200 MB."""

STEPS = {"image": 800, "alexnet": 800, "resnet20": 800, "gpt": 4500, "language": 2000}
"""Steps of a training of the recipes."""


@dataclass(frozen=True)
class Trial:
    """What one training was.

    Attributes:
        workload: The task; its small model.
        optimizer: What takes the averages for gradients: ``"momentum"`` is SGD with momentum 0.9, ``"nesterov"``
            with Nesterov's, ``"muon"`` Muon for hidden matrices beside AdamW.
        workers: Number of workers.
        method: As on the command line; ``"ddp"`` for averages that are not compressed. Or a line of
            :class:`Periods`.
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


def run(
    trial: Trial,
    steps: int,
    on_step: Callable[[int], object],
    samples: int | None = None,
    dataset: Dataset = "auto",
    batch: int = 0,
    device: Device = "cpu",
    averages: Callable[[nn.Module, Trial, int], Averages] | None = None,
) -> Result:
    """Trains. All workers share one model, since every average has the same bits on all of them, but for local steps.

    Args:
        trial: What to train.
        steps: Number of steps.
        on_step: Called with the number of steps done.
        samples: Test samples it is judged by; all if None.
        dataset: The images.
        batch: Samples a worker and step; 0 for the workload's own.
        device: Where the model computes.
        averages: Makes what averages gradients in every step; of the trial's method if None.

    Raises:
        ConfigurationError: If there is no such device here.
    """
    placement.check(device)
    place = placement.place(device)
    workload = WORKLOADS[trial.workload]
    source = workload.locate(dataset)
    task = _task(workload, source, trial.workers * (batch or workload.batch), trial.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trial.seed)
        net = workload.model(source, small=True).to(place)
    periods = Periods.parse(trial.method)
    workers = (averages or Averages)(net, trial, steps) if periods is None else _LocalSteps(net, trial, steps, periods)
    for step, (inputs, wanted) in enumerate(islice(task.batches(), steps), start=1):
        losses = workers.step(inputs.to(place), wanted.to(place))
        on_step(step)
        if not math.isfinite(losses):
            return Result(0.0, math.inf, workers.sent_bytes / step, workers.dense_bytes)
    workers.end()
    net.eval()
    end = fingerprint(net)
    score = task.score(FromHost(net, place), samples)
    loss = bits(score.nats / score.seen)
    return Result(
        score.correct / score.seen,
        loss if math.isfinite(loss) else math.inf,
        workers.sent_bytes / steps,
        workers.dense_bytes,
        end,
    )


@cache
def _task(workload: Workload, source: DataSource, batch: int, seed: int) -> Task:
    """All workers' share at once."""
    return workload.task(source, Share(batch, seed))


def world_of(
    contender: Contender,
    slots: Sequence[Slot],
    workers: int,
    seed: int,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> LocalWorld:
    """Workers who average by a line's method, in as many buckets as tell it from one for the whole model."""
    chosen = contender.configuration(seed)
    cut = 4 * slots[-1].stop // BUCKETS if chosen.granularity.scope == "bucket" else None
    return LocalWorld(chosen, slots, workers, device, bucket_bytes=contender.bucket_bytes or cut)


class _Workers:
    """What all ways to train have.

    Args:
        net: The model.
        trial: What to train.
        contender: What averages.
    """

    def __init__(self, net: nn.Module, trial: Trial, contender: Contender) -> None:
        self._net, self._trial = net, trial
        self._slots = flat_slots([(name, tuple(each.shape)) for name, each in net.named_parameters()])
        numel = self._slots[-1].stop
        device = next(net.parameters()).device
        self._flat = [torch.zeros(numel, device=device) for _ in range(trial.workers)]
        self._views = [self._named(flat) for flat in self._flat]
        self.dense_bytes = 2 * (trial.workers - 1) / trial.workers * 4 * numel
        self.sent_bytes = 0.0
        self._world: LocalWorld | None = None
        if contender.name != DDP:
            self._world = world_of(contender, self._slots, trial.workers, trial.seed, device)

    def step(self, inputs: Tensor, wanted: Tensor) -> float:
        """Trains on a batch, and returns the mean loss."""
        raise NotImplementedError

    def end(self) -> None:
        """Called after the last step, before the model is judged."""

    def _share(self, rank: int, net: nn.Module, inputs: Tensor, wanted: Tensor) -> Tensor:
        """A worker's loss on its part of a batch, with its gradients in ``grad``."""
        each = len(wanted) // len(inputs)  # answers a sample
        net.zero_grad()
        mine = wanted.view(len(inputs), each)[rank :: self._trial.workers].flatten()
        loss = F.cross_entropy(net(inputs[rank :: self._trial.workers]), mine)
        torch.autograd.backward(loss)
        return loss.detach()

    def _average(self) -> None:
        """Leaves the average over all workers in the first one's place."""
        if self._world is None:
            for other in self._flat[1:]:
                self._flat[0] += other
            self._flat[0] /= self._trial.workers
            self.sent_bytes += self.dense_bytes
        else:
            self.sent_bytes += self._world.average(self._flat).sent_bytes

    def _named(self, flat: Tensor) -> list[Tensor]:
        return [flat[slot.offset : slot.stop].view(slot.shape) for slot in self._slots]


@dataclass(frozen=True)
class _Worker:
    """What :class:`gradwire.SecondMoments` asks of a handle."""

    engine: Engine


class Averages(_Workers):
    """Each worker's gradient of its part of a batch, averaged for one optimizer.

    Args:
        net: The model.
        trial: What to train.
        steps: Number of steps.
    """

    def __init__(self, net: nn.Module, trial: Trial, steps: int) -> None:
        contender = Contender.parse(trial.method)
        super().__init__(net, trial, contender)
        self._local, self._moments = _Local(net, trial, steps), contender.moments

    def step(self, inputs: Tensor, wanted: Tensor) -> float:
        """Takes the average of all workers' gradients, and returns the mean loss."""
        total = 0.0
        parameters = list(self._net.parameters())
        for rank, views in enumerate(self._views):
            with self._squares(rank):
                total += self._share(rank, self._net, inputs, wanted).item() / self._trial.workers
            for view, parameter in zip(views, parameters, strict=True):
                if parameter.grad is not None:
                    view.copy_(parameter.grad)
        self._average()
        for view, parameter in zip(self._views[0], parameters, strict=True):
            parameter.grad = view
        self._local.step()
        return total

    @contextmanager
    def _squares(self, rank: int) -> Iterator[None]:
        """Within it a worker's squares are formed, if its method asks for squares of samples or of micro-batches."""
        if self._world is None or self._moments == "step":
            yield
            return
        with closing(SecondMoments(self._net, _Worker(self._world.engines[rank]), self._moments)):
            yield


class _Local:
    """An optimizer and its schedule.

    Args:
        net: What it trains.
        trial: With which optimizer.
        steps: Number of steps.
    """

    def __init__(self, net: nn.Module, trial: Trial, steps: int) -> None:
        self._optimizer = optimizer_of(trial.optimizer, net, trial.learning_rate)
        self._schedule = one_cycle(self._optimizer, trial.learning_rate, steps)

    def step(self) -> None:
        """Takes the gradients."""
        self._optimizer.step()
        self._schedule.step()


class _LocalSteps(_Workers):
    """A model and an optimizer for each worker; what local steps change is averaged, as :func:`gradwire.periodic` does.

    Args:
        net: The first worker's model.
        trial: What to train.
        steps: Number of steps.
        periods: When changes are averaged.
    """

    def __init__(self, net: nn.Module, trial: Trial, steps: int, periods: Periods) -> None:
        super().__init__(net, trial, periods.contender)
        self._nets = [net, *(copy.deepcopy(net) for _ in range(trial.workers - 1))]
        self._local = [_Local(each, trial, steps) for each in self._nets]
        self._every, self._done = periods.every, 0
        self._anchor = torch.cat([each.detach().flatten() for each in net.parameters()])
        self._outer = nesterov([self._anchor]) if periods.outer else None

    def step(self, inputs: Tensor, wanted: Tensor) -> float:
        total = 0.0
        for rank, (net, local) in enumerate(zip(self._nets, self._local, strict=True)):
            total += self._share(rank, net, inputs, wanted).item() / self._trial.workers
            local.step()
        self._done += 1
        if self._done % self._every == 0:
            self._meet()
        return total

    def end(self) -> None:
        """Averages what the last period left."""
        if self._done % self._every:
            self._meet()

    @torch.no_grad()
    def _meet(self) -> None:
        for net, change in zip(self._nets, self._flat, strict=True):
            torch.sub(self._anchor, torch.cat([each.flatten() for each in net.parameters()]), out=change)
        self._average()
        if self._outer is None:
            self._anchor -= self._flat[0]
        else:
            self._anchor.grad = self._flat[0]
            self._outer.step()
        for net in self._nets:
            for mine, anchor in zip(net.parameters(), self._named(self._anchor), strict=True):
                mine.copy_(anchor)
        for together in zip(*(net.buffers() for net in self._nets), strict=True):
            if together[0].is_floating_point():
                mean = torch.stack(together).mean(0)
                self.sent_bytes += 2 * (len(together) - 1) / len(together) * 4 * mean.numel()
                for buffer in together:
                    buffer.copy_(mean)
