"""A step in simulated time: the wire's own scheduler and fusion, over a network and cores that exist as a clock only.

All workers are alike, so one is simulated. Where some are slower, what all wait for is the slowest: it issues every
collective last, for all it waits for is late for the others too, and so its time is everybody's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from gradwire.cost import shadow
from gradwire.cost.clock import Clock, Row, Work
from gradwire.cost.costs import FREE, Costs, Profile
from gradwire.cost.network import Network, sum_of
from gradwire.cost.transport import ClockedTransport
from gradwire.cost.workload import Workload
from gradwire.engine.configuration import Configuration
from gradwire.engine.engine import Engine
from gradwire.engine.unit import Share, Unit
from gradwire.errors import ConfigurationError, PayloadError
from gradwire.methods import name_of
from gradwire.wire import Circles, Scheduler, Synchronization, Transport
from gradwire.wire.circles import circle_of

STEPS = 4
"""Steps that are simulated, of which the later half counts: some methods alternate, and first steps are others."""


@dataclass(frozen=True)
class Setting:
    """Where a model is trained.

    Attributes:
        workload: What a worker computes in a step.
        network: What is between the workers.
        profile: What methods take on the device.
        cores: Cores that each worker has for everything: backward, encoding, and what sending takes of them.
        slowest: How many times as long as the others' the slowest worker's computation takes, at least 1.
        turn: Seconds of a core in which a step is handed to the wire's thread and back, whatever is averaged.
        levels: The networks within a node and between the workers of one place in all nodes, where those are known.
    """

    workload: Workload
    network: Network
    profile: Profile
    cores: float = float("inf")
    slowest: float = 1.0
    turn: float = 0.0
    levels: tuple[Network, Network] | None = None

    def __post_init__(self) -> None:
        if not self.slowest >= 1:
            raise ConfigurationError(f"slowest={self.slowest!r} is out of range; choose 1 or more")
        if not self.cores > 0:
            raise ConfigurationError(f"cores={self.cores!r} is out of range; choose more than 0")


@dataclass(frozen=True)
class Prediction:
    """A step as simulated.

    Attributes:
        label: What averages, as it is pasted.
        seconds: From its beginning until every gradient is averaged.
        low: The same if everything that was measured were as much faster as its spread.
        high: The same if it were as much slower.
        exposed: What the averages add to the computation.
        wire_bytes: Handed over to be sent by a worker.
        encode: Seconds of the wire's thread before first rounds.
        decode: The same after answers.
        wire: Seconds in which that thread waits for the network.
        memory_bytes: What a worker keeps from step to step.
        note: What is assumed.
        work: The last step, as it would be drawn.
    """

    label: str
    seconds: float
    low: float
    high: float
    exposed: float
    wire_bytes: float
    encode: float
    decode: float
    wire: float
    memory_bytes: int
    note: str = ""
    work: tuple[Work, ...] = ()


def simulate(configuration: Configuration, setting: Setting, label: str | None = None) -> Prediction:
    """A step with gradwire.

    Raises:
        ConfigurationError: If the profile has no costs of the method, or so many workers are not possible.
    """
    costs, note = setting.profile.of(configuration)
    return replace(_mean(Worker(configuration, setting, costs)), label=label or str(configuration), note=note)


_SHORT = {torch.float32: "fp32", torch.float64: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16"}


def plain(setting: Setting) -> Prediction:
    """A step of plain DDP: a bucket's all-reduce is issued when its gradients are there."""
    clock, workload = Clock(setting.cores), setting.workload
    clock.backward([setting.slowest * each for each in workload.backward])
    sent, transfers = 0, []
    for number, bucket in enumerate(workload.buckets):
        clock.until_ready(number)
        nbytes = workload.dtype.itemsize * bucket[-1].stop
        transfers.append(clock.send(setting.network.cost(sum_of(workload.dtype), nbytes), (number, 0)))
        sent += _all_reduced(nbytes, setting.network.workers)
    for transfer in transfers:
        clock.until_there(transfer)
    computed = setting.slowest * workload.seconds
    seconds = clock.now + setting.slowest * workload.forward
    return Prediction(
        f"DDP {_SHORT.get(workload.dtype, workload.dtype)}",
        seconds,
        seconds,
        seconds,
        seconds - computed,
        sent,
        0.0,
        0.0,
        clock.waited,
        0,
        "",
        tuple(clock.done),
    )


def _all_reduced(nbytes: int, workers: int) -> int:
    return 2 * (workers - 1) * nbytes // workers


def _mean(worker: Worker) -> Prediction:
    """The mean of the later half of some steps."""
    seen = [worker.step() for _ in range(STEPS)][STEPS // 2 :]

    def mean(of: Callable[[Prediction], float]) -> float:
        return sum(map(of, seen)) / len(seen)

    return replace(
        seen[-1],
        seconds=mean(lambda each: each.seconds),
        low=mean(lambda each: each.low),
        high=mean(lambda each: each.high),
        exposed=mean(lambda each: each.exposed),
        wire_bytes=mean(lambda each: each.wire_bytes),
        encode=mean(lambda each: each.encode),
        decode=mean(lambda each: each.decode),
        wire=mean(lambda each: each.wire),
    )


class Worker:
    """One worker, step by step.

    Args:
        configuration: What averages.
        setting: Where.
        costs: What the method takes.
    """

    def __init__(self, configuration: Configuration, setting: Setting, costs: Costs = FREE) -> None:
        self._setting = setting
        self._costs = costs
        self._dense = setting.profile.methods.get("dense/allreduce/layer/none", FREE)
        self._spread = max(costs.spread, setting.network.spread)
        self._sizes_only = shadow.runs(configuration)
        device = shadow.META if self._sizes_only else torch.device("cpu")
        workers, inside = setting.network.workers, configuration.inside
        self._nodes = None if inside is None else inside.of(range(workers))
        if self._nodes is not None and (
            setting.levels is None
            or [each.workers for each in setting.levels] != [self._nodes.workers, self._nodes.count]
        ):
            raise ConfigurationError(
                f"inside={inside}: the network of {workers} workers is not one of {self._nodes.count} nodes of "
                f"{self._nodes.workers}; give as many workers a node there, as with --gpus"
            )
        kind = shadow.SizesOnly if self._sizes_only else Engine
        self._engine = kind(configuration, 0, workers, device, self._nodes)
        slots = setting.workload.buckets
        self._whole = configuration.granularity.scope == "model"
        self._slots = (setting.workload.whole,) if self._whole else slots
        self._units: list[Unit] | None = None

    def step(self) -> Prediction:
        """The next step."""
        setting, engine = self._setting, self._engine
        clocks = [Clock(setting.cores, factor) for factor in (1.0, 1.0 - self._spread, 1.0 + self._spread)]
        transport: Transport = ClockedTransport(clocks, setting.network)
        if setting.levels is not None and self._nodes is not None:
            near, between = setting.levels
            transport = Circles(transport, ClockedTransport(clocks, near, "node"), ClockedTransport(clocks, between))
        scheduler = Scheduler(transport, engine.meter, engine.configuration.fuse_bytes)
        for clock in clocks:
            clock.backward([setting.slowest * each for each in setting.workload.backward])
        if self._units is None:
            self._units = [engine.unit(slots) for slots in self._slots]
        before, last = engine.meter.wire_bytes, len(self._units) - 1
        engine.before_step()
        for number, unit in enumerate(self._units):
            for clock in clocks:
                clock.until_ready(len(setting.workload.buckets) - 1 if self._whole else number)
            gradient = self._gradient(unit.numel)
            asked = [
                self._clocked(share, share.synchronize(gradient, engine.step), transport, clocks, number)
                for share in engine.shares(unit)
            ]
            engine.count(gradient.nbytes, number == last)
            try:
                scheduler.submit(asked, lambda: None, last=number == last)
            except PayloadError as error:
                (rule,) = engine.configuration.rules
                raise ConfigurationError(
                    f"{name_of(rule.method)} cannot be simulated: what a worker sends depends on what "
                    "the others sent it; measure it with gradwire bench sync"
                ) from error
        forward = setting.slowest * setting.workload.forward
        computed = setting.slowest * setting.workload.seconds
        seconds, low, high = (clock.now + setting.turn / min(1.0, setting.cores) + forward for clock in clocks)
        clock, *_ = clocks
        spent = {
            row: sum(each.stop - each.start for each in clock.done if each.row == row) for row in ("encode", "decode")
        }
        return Prediction(
            label="",
            seconds=seconds,
            low=low,
            high=high,
            exposed=seconds - computed,
            wire_bytes=engine.meter.wire_bytes - before,
            encode=spent["encode"],
            decode=spent["decode"],
            wire=clock.waited,
            memory_bytes=engine.store.nbytes,
            work=tuple(clock.done),
        )

    def _gradient(self, numel: int) -> torch.Tensor:
        if self._sizes_only:
            return torch.empty(numel, device=shadow.META, dtype=torch.float32)
        return torch.randn(numel, generator=torch.Generator().manual_seed(self._engine.step), dtype=torch.float32)

    def _clocked(
        self, share: Share, average: Synchronization, transport: Transport, clocks: Sequence[Clock], number: int
    ) -> Synchronization:
        """The same requests, with the processor busy before each and after the last."""
        costs = self._costs if share.aside is None else self._dense
        block = share.context.block
        unit = number if share.aside is None else None
        size = len(block.slots), block.numel, share.context.world_size
        copied = 0.0  # into rows, into their mean, and back from rows
        if share.within is not None:
            copied = self._setting.profile.copy * sum(slot.numel for slot in share.within.slots)

        def work(row: Row, stage: int) -> None:
            """Of a method in two levels the first round and the last are none of its own."""
            own = stage if share.within is None else stage - 1
            seconds = self._setting.slowest * (copied + costs.seconds(own, *size) if own >= 0 else copied)
            for clock in clocks:
                clock.compute(row, unit, stage, seconds)

        work("encode", 0)
        stage, answer = 0, None
        while True:
            try:
                request = next(average) if answer is None else average.send(answer)
            except StopIteration:
                return
            for each in request if isinstance(request, list) else [request]:
                line = circle_of(transport, each.among)
                if isinstance(line, ClockedTransport):
                    line.asked(each.payload, (unit, stage))
            answer = yield request
            stage += 1
            work("decode", stage)
