"""A method is chosen in training: the group and the codecs are measured, then the few steps that tell are run.

What is predicted to be fastest is tried, after dense averages and 16-bit ones, in steps of the user's own training;
what was measured there decides, alike on all ranks. So a wrong prediction costs some steps and never more.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
import torch.distributed as dist

from gradwire.attach.shards import cut_groups, local_parameters
from gradwire.cost import group, measure, probe
from gradwire.cost.advice import ALIKE, GAIN, Candidate, advise, as_text
from gradwire.cost.costs import Profile
from gradwire.cost.network import Level, Links, Network
from gradwire.cost.shapes import NamedShape
from gradwire.cost.simulation import Setting
from gradwire.cost.workload import Workload
from gradwire.engine.automatic import EXACT, Automatic
from gradwire.engine.engine import Engine
from gradwire.engine.guards import Guard
from gradwire.engine.unit import Unit
from gradwire.errors import ConfigurationError
from gradwire.layout import Slot, flat_slots
from gradwire.wire import Transport
from gradwire.wire.circles import circle_of
from gradwire.wire.meter import Event

SETTLING = 3
"""Steps after a change that are not timed: DDP forms its buckets anew in the first, and methods allocate."""

TIMED = 6
"""Steps by each that is tried, of which the median counts."""

SIZES = (1 << 10, 1 << 15, 1 << 18, 1 << 20)
REPEATS = 3
"""Payloads in bytes that the group is probed with, and how often each."""

_log = logging.getLogger("gradwire")


@dataclass(frozen=True)
class Decision:
    """What was chosen, and why.

    Attributes:
        line: What averages from now on, as on the command line.
        reason: Why, in a sentence or two.
        measured: Median seconds of a step, of everything that was tried in training; the slowest worker's.
        predicted: The same of everything that was chosen among, as simulated before.
    """

    line: str
    reason: str
    measured: Mapping[str, float] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.line}: {self.reason}"


@dataclass(frozen=True)
class _Moment:
    """What an event on a device is, on the CPU."""

    seconds: float

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: _Moment) -> float:
        return 1000 * (later.seconds - self.seconds)


class Trial(Guard):
    """Chooses among the lines of an :class:`Automatic`; afterwards it does nothing.

    Args:
        automatic: What is chosen among.
        parameters: Names and shapes of a model's parameters, on which the methods are measured, here and now.
        device: Where.

    Attributes:
        decision: Made from what was measured, or taken over from a saved run; None until then.
    """

    def __init__(self, automatic: Automatic, parameters: Sequence[NamedShape], device: torch.device) -> None:
        rules = [replace(rule, start=0) for rule in automatic.rules]
        self._candidates = [Candidate.of(*each) for each in zip(automatic.lines, rules, strict=True)]
        rules = [replace(rule, inside=None) for rule in rules]
        self._slots = flat_slots(parameters)
        self._profile: Profile = measure.here(rules, parameters, device)
        few = Workload((flat_slots(measure.sample(parameters)),), (0.0,), 0.0)
        flat = [Candidate.of(*each) for each in zip(automatic.lines, rules, strict=True)]
        advise(Setting(few, Links((Level(2, 1e9, 0.0),)), self._profile), flat)  # or it says what cannot be
        self.decision: Decision | None = None

    @classmethod
    def of(cls, automatic: Automatic, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> Trial:
        """For the parameters of a model.

        Raises:
            ConfigurationError: If the model is cut into shards, whose replicas would choose each for themselves.
        """
        if cut_groups(parameters):
            raise ConfigurationError(
                "method='auto' cannot choose for a model that is cut into shards, since the replicas of each would "
                "choose for themselves; take what 'gradwire advise' says under torchrun, or replicate() in place of "
                "fully_shard()"
            )
        if dist.get_rank() == 0:
            _log.warning(
                "auto measures %d methods on this device and the group, some ten seconds, then steps of the training",
                len(automatic.lines),
            )
        return cls(
            automatic,
            [(name, tuple(each.shape)) for name, each in local_parameters(parameters)],
            parameters[0][1].device,
        )

    def begin(self, engine: Engine, transport: Transport) -> None:
        """Probes the group and begins with dense averages; on the wire's thread of every rank, between two steps."""
        self._engine, self._transport, self._device = engine, transport, engine.store.device
        self.restart()
        if transport.world_size == 1:
            self._settle(Decision(EXACT[0], "there is one worker, and nothing is sent"))
            return
        self._network = self._probed(transport)
        self._levels: tuple[Network, Network] | None = None
        if engine.nodes is not None:
            circles = (circle_of(transport, "node"), circle_of(transport, "peers"))
            near, between = (self._probed(each) for each in circles)
            self._levels = near, between
        self._merged, self._apart = measure.slowest(self._profile, transport, self._device)
        self._cores = group.cores(transport, self._device)

    def _probed(self, transport: Transport) -> Network:
        if transport.world_size == 1:
            return Links((Level(1, 1e9, 0.0),))
        return probe.measured(transport, self._device, SIZES, REPEATS)

    def restart(self) -> None:
        """Begins with dense averages."""
        self.decision = None
        self._seconds: dict[str, float] = {}
        self._predicted: dict[str, float] = {}
        self._tried = list(EXACT)
        self._units: list[Unit] = []
        self._coming: deque[list[Event]] = deque()
        self._passed: list[tuple[list[Event], Event]] = []
        self._use(self._automatic.trying(EXACT[0]))

    def go_on(self, automatic: Automatic) -> None:
        """Takes over what a saved run had chosen, if it had."""
        if automatic.settled:
            self.decision = Decision(automatic.now, "as was decided before the state was saved")
        else:
            self.restart()

    @property
    def _automatic(self) -> Automatic:
        if not isinstance(self._engine.configuration, Automatic):
            raise TypeError(f"{self._engine.configuration} leaves nothing to choose")
        return self._engine.configuration

    def before_step(self) -> None:
        """A step's buffers are about to arrive."""
        if self.decision is None:
            self._coming.append([])

    def on_arrival(self) -> None:
        """Marks when a buffer did."""
        if self.decision is None and self._coming:
            self._coming[-1].append(self._now())

    def before_encode(self, unit: Unit, gradient: torch.Tensor) -> None:
        """Notes in which order they come."""
        if self.decision is None:
            self._units.append(unit)

    def after_step(self) -> None:
        """Marks the end of a step, and goes on to what is tried next when enough have been timed."""
        if self.decision is not None:
            return
        arrived = self._coming.popleft() if self._coming else []
        units, self._units = self._units, []
        if self._engine.averages_densely:
            self._passed.clear()
            return
        self._passed.append((arrived, self._now()))
        if len(self._passed) == SETTLING + TIMED + 1:
            passed, self._passed = self._passed[SETTLING:], []
            self._next(passed, [unit.slots for unit in units if unit.numel])

    def _next(self, passed: list[tuple[list[Event], Event]], buckets: list[tuple[Slot, ...]]) -> None:
        """What some steps took; then what is to be tried after them, or the decision."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        line = self._automatic.now
        taken = [before.elapsed_time(after) / 1000 for (_, before), (_, after) in pairwise(passed)]
        self._seconds[line] = statistics.median(probe.largest(taken, self._transport, self._device))
        if line == EXACT[0]:
            self._workload = self._computed(passed, buckets)
        if len(self._seconds) == len(EXACT):
            self._tried += self._promising()
        if len(self._seconds) < len(self._tried):
            self._use(self._automatic.trying(self._tried[len(self._seconds)]))
        else:
            self._settle(decide(self._seconds, self._predicted, self._apart))

    def _computed(self, passed: list[tuple[list[Event], Event]], buckets: list[tuple[Slot, ...]]) -> Workload:
        """What the workers compute: from the end of a step to the first arrival of the next, and to each other one."""
        count = len(buckets)
        whole = all(len(arrived) == count for arrived, _ in passed)
        marks = [[before, *arrived] for (_, before), (arrived, _) in pairwise(passed)] if whole else []
        spans = [[max(a.elapsed_time(b) / 1000, 0.0) for a, b in pairwise(each)] for each in marks]
        works = [statistics.median(each) for each in zip(*spans, strict=True)] or [0.0] * count
        return Workload(tuple(buckets), tuple(probe.largest(works, self._transport, self._device)), 0.0)

    def _promising(self) -> list[str]:
        """What would be advised and what is predicted fastest, if anything surely gains; rank 0 simulates for all."""
        found: tuple[list[str], dict[str, float]] = [], {}
        if self._transport.rank == 0:
            setting = Setting(self._workload, self._network, self._merged, self._cores, levels=self._levels)
            told = advise(setting, self._candidates)
            lines = list(self._automatic.lines)
            chosen = lines[self._candidates.index(told.chosen)] if told.chosen is not None else EXACT[0]
            predicted = {line: row.seconds for line, row in zip(lines, told.rows[1:], strict=True)}
            quickest = min(lines, key=lambda line: predicted[line])
            found = [] if chosen in EXACT else list(dict.fromkeys((chosen, quickest))), predicted
        promising, self._predicted = probe.agreed(found, self._transport, self._device)
        return list(promising)

    def _settle(self, decision: Decision) -> None:
        self.decision = decision
        automatic = self._automatic.chosen(decision.line)
        if automatic.now == self._automatic.now:
            self._engine.configuration = automatic  # and goes on with what it remembers
        else:
            self._use(automatic)
        if self._engine.rank == 0:
            _log.warning("auto chose %s", decision)

    def _use(self, automatic: Automatic) -> None:
        self._engine.adopt(automatic, self._slots)

    def _now(self) -> Event:
        mark = self._engine.meter.mark
        return _Moment(time.perf_counter()) if mark is None else mark()

    def __str__(self) -> str:
        return "trial"


def decide(seconds: Mapping[str, float], predicted: Mapping[str, float], apart: float = 1.0) -> Decision:
    """By what was measured, which all ranks have alike.

    Args:
        seconds: Of a step, by each line that was tried, :data:`EXACT` among them.
        predicted: Of what was chosen among.
        apart: How many times as long as the quickest worker the slowest takes to encode.
    """
    full, half = (seconds[line] for line in EXACT)
    exact = EXACT[1] if half < (1 - ALIKE) * full else EXACT[0]
    compressed = [line for line in seconds if line not in EXACT]
    quickest = min((seconds[each] for each in compressed), default=math.inf)
    alike = [each for each in compressed if seconds[each] <= (1 + ALIKE) * quickest]
    line = next((each for each in alike if seconds[each] < (1 - GAIN) * min(full, half)), exact)
    reason = f"a step takes {', '.join(f'{as_text(each)} by {name}' for name, each in seconds.items())}"
    if line != exact:
        reason += "; compare the accuracy with that of dense averages before you rely on it"
    elif not compressed:
        reason += "; no compressed average was predicted to be surely faster"
    if apart > group.APART:
        reason += f"; the slowest worker takes {apart:.1f} times as long to encode as the quickest"
    return Decision(line, reason, dict(seconds), dict(predicted))


def check_trial(trial: Trial | None) -> Trial:
    """Raises ConfigurationError unless a method is chosen in training."""
    if trial is None:
        raise ConfigurationError(
            "a method was given, and nothing was chosen; attach with method='auto' to have it chosen"
        )
    return trial
