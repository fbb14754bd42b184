"""Which line keeps the accuracy: methods under the optimizers that people use, all tuned with the same effort."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from gradwire.errors import ConfigurationError
from gradwire_bench.contenders import DDP, Contender
from gradwire_bench.optimizers import OptimizerName, base_rate
from gradwire_bench.periods import Periods
from gradwire_bench.trial import STEPS, Result, Trial, run
from gradwire_bench.workloads import WORKLOADS, Name

TRIES = 5
"""Learning rates that a method gets at most, each twice or half another: its tuning effort. Dense averages get as many
as it takes until none is better, since all others begin at theirs."""

SEEDS = 3
"""Trainings at the best learning rate."""

UNSTEADY = 0.1
"""A share of the loss, or of the accuracy: seeds that lie further apart tell that some diverge at their learning rate,
which is then not taken."""

POINTS, SHARE_OF_LOSS = 0.5, 0.01
"""What may be lost against dense averages: percentage points of accuracy for images, a share of the loss for text."""

Kind = Literal["gradient", "momentum", "local"]

Cell = tuple[Name, OptimizerName, int]
"""A workload, an optimizer and a number of workers: what dense averages are tuned for, and a table has rows of."""


@dataclass(frozen=True)
class Candidate:
    """A line to paste.

    Attributes:
        method: As on the command line.
        kind: ``"gradient"`` if any optimizer takes its averages; ``"momentum"`` if it has a momentum of its own, so
            that it goes with plain SGD and stands beside SGD with momentum; ``"local"`` for averages of what local
            steps changed, which any optimizer takes.
        rate: The learning rate to begin with, as a multiple of what dense averages train best with.
    """

    method: str
    kind: Kind = "gradient"
    rate: float = 1.0


MEASURED = Path(__file__).with_name("recipes.json")
"""What this release was measured with."""

CANDIDATES = (
    Candidate("qsgd:bits=4"),
    Candidate("topk:ratio=0.01"),
    Candidate("topk:ratio=0.01,granularity=model,values=qsgd:4"),
    Candidate("deadzone:bits=0.1"),
    Candidate("deadzone:bits=0.3"),
    Candidate("deadzone:bits=0.8"),
    Candidate("deadzone:bits=2"),
    Candidate("subspace:bits=0.15"),
    Candidate("subspace:bits=0.4"),
    Candidate("subspace:bits=0.4,route=sharded"),
    Candidate("subspace:bits=0.6"),
    Candidate("subspace:bits=0.8"),
    Candidate("subspace:bits=0.8,route=sharded"),
    Candidate("subspace:bits=1.2"),
    Candidate("subspace:bits=1.5"),
    Candidate("subspace:bits=1.5,route=sharded"),
    Candidate("subspace:bits=3,route=sharded"),
    Candidate("dithered:bits=0.5"),
    Candidate("dithered:bits=1"),
    Candidate("powersgd:rank=4"),
    Candidate("powersgd:rank=4,bits=16"),
    Candidate("acpsgd:rank=4"),
    Candidate("acpsgd:rank=4,bits=16"),
    Candidate("acpsgd:rank=2,bits=16"),
    Candidate("efsignsgd"),
    Candidate("dgc:ratio=0.01", "momentum"),
    Candidate("demo", "momentum", 0.1),
    Candidate("dion", "momentum"),
    Candidate("ef21sgdm:ratio=0.05", "momentum", 10.0),
    Candidate("blocksgdm", "momentum"),
    Candidate("topk:ratio=0.05"),
    Candidate("3lc"),
    Candidate("qgz"),
    Candidate("onebit"),
    Candidate("eden:bits=1"),
    Candidate("oktopk:ratio=0.01"),
    Candidate("randomk:ratio=0.1"),
    Candidate("periodic:every=4,method=qsgd,bits=4,owner=qsgd:4", "local"),
    Candidate("periodic:every=4,method=subspace,bits=1.2,route=sharded", "local"),
    Candidate("periodic:every=16,outer=nesterov,method=dense", "local"),
    Candidate("periodic:every=16,outer=nesterov,method=qsgd,bits=4,owner=qsgd:4", "local"),
    Candidate("periodic:every=32,outer=nesterov,method=qsgd,bits=4,owner=qsgd:4", "local"),
)


@dataclass(frozen=True)
class Done:
    """A training that was run."""

    trial: Trial
    result: Result


@dataclass(frozen=True)
class Row:
    """What a method makes of a workload under an optimizer.

    Attributes:
        workload: The task.
        optimizer: The column it stands in; ``"momentum"`` also for methods that carry momentum themselves.
        workers: How many.
        method: As on the command line.
        learning_rate: The best one tried.
        tries: Learning rates tried.
        score: Accuracy in percent for images, loss in bits for text; means over seeds.
        spread: From the least of the seeds to the most.
        lost: Against dense averages: percentage points, or percent of the loss; below zero where it is better.
        fewer_bytes: How many times fewer bytes than dense averages.
        seeds: Trainings at that rate.
        pasted: What is lost at the learning rate that dense averages train best with: by who pastes the line and tunes
            nothing. None unless all seeds were trained there.
    """

    workload: Name
    optimizer: OptimizerName
    workers: int
    method: str
    learning_rate: float
    tries: int
    score: float
    spread: float
    lost: float
    fewer_bytes: float
    seeds: int
    pasted: float | None = None

    @property
    def cell(self) -> Cell:
        """Where it stands."""
        return self.workload, self.optimizer, self.workers

    @property
    def keeps(self) -> bool:
        """Whether it loses no more than what may be lost."""
        return self.lost <= limit(self.workload)

    @property
    def keeps_as_pasted(self) -> bool:
        """Whether it does so with nothing tuned for it."""
        return self.pasted is not None and self.pasted <= limit(self.workload)


def by_loss(workload: Name) -> bool:
    """Whether a task is judged by its loss, not by the share of its right answers."""
    return WORKLOADS[workload].kind == "text"


def limit(workload: Name) -> float:
    """What may be lost: percent of the loss, or percentage points."""
    return 100 * SHARE_OF_LOSS if by_loss(workload) else POINTS


def candidates(optimizer: OptimizerName) -> list[Candidate]:
    """Dense averages, then what stands in an optimizer's column."""
    fitting = [each for each in CANDIDATES if each.kind != "momentum" or optimizer == "momentum"]
    return [Candidate(DDP), *fitting]


@dataclass(frozen=True)
class Column:
    """A workload under an optimizer, and what has been trained of it.

    Attributes:
        results: Of all trainings.
        workload: The task.
        optimizer: The column's; methods that carry momentum themselves stand in that of momentum.
        workers: How many.
    """

    results: Mapping[Trial, Result]
    workload: Name
    optimizer: OptimizerName
    workers: int

    def trial(self, candidate: Candidate, rate: float, seed: int = 0) -> Trial:
        """A training; plain SGD takes the averages of what has a momentum of its own."""
        takes: OptimizerName = "sgd" if candidate.kind == "momentum" else self.optimizer
        return Trial(self.workload, takes, self.workers, candidate.method, rate, seed)

    def tried(self, candidate: Candidate) -> dict[float, float]:
        """Goodness by learning rate, of the first seed."""
        return {
            each.learning_rate: self._goodness(_score(self.workload, result))
            for each, result in self.results.items()
            if each.method == candidate.method and each == self.trial(candidate, each.learning_rate)
        }

    def best(self, candidate: Candidate) -> float:
        """The best learning rate tried, of those at which no seed was seen to diverge."""
        tried = self.tried(candidate)
        return max(tried, key=lambda rate: (self._is_steady(candidate, rate), tried[rate]))

    def settled(self, candidate: Candidate) -> float:
        """Of the rates at which all seeds were trained, the one that is best by their mean."""
        means = {
            rate: self._goodness(statistics.fmean(scores))
            for rate in self.tried(candidate)
            if len(scores := self.scores(candidate, rate)) == SEEDS
        }
        return max(means, key=lambda rate: (self._is_steady(candidate, rate), means[rate]))

    def _goodness(self, score: float) -> float:
        return -score if by_loss(self.workload) else score

    def _is_steady(self, candidate: Candidate, rate: float) -> bool:
        scores = self.scores(candidate, rate)
        return max(scores) - min(scores) <= UNSTEADY * min(scores)

    def next(self, candidate: Candidate, start: float, tuned: bool = False) -> Trial | None:
        """The next training, or None if it is settled; ``tuned`` leaves out the first rate's other seeds."""
        tried, start = self.tried(candidate), float(f"{start:.4g}")
        for rate in (start, start / 2, start * 2):
            if rate not in tried:
                return self.trial(candidate, rate)
        best = self.best(candidate)
        if len(tried) < TRIES or candidate.method == DDP:
            if best == max(tried):
                return self.trial(candidate, best * 2)
            if best == min(tried):
                return self.trial(candidate, best / 2)
        rates = (best,) if tuned or candidate.kind == "momentum" else (best, start)
        wanted = (self.trial(candidate, rate, seed) for rate in rates for seed in range(SEEDS))
        return next((each for each in wanted if each not in self.results), None)

    def scores(self, candidate: Candidate, rate: float) -> list[float]:
        """Of all seeds that were trained at a rate."""
        trained = (self.trial(candidate, rate, seed) for seed in range(SEEDS))
        return [_score(self.workload, self.results[each]) for each in trained if each in self.results]

    def row(self, candidate: Candidate, dense: Row | None) -> Row | None:
        """What a candidate makes of it beside dense averages; None if it is not settled."""
        tried = self.tried(candidate)
        if not tried or self.next(candidate, next(iter(tried)), tuned=True) is not None:
            return None
        best = self.settled(candidate)
        result, same = self.results[self.trial(candidate, best)], self.scores(candidate, best)
        pasted = self.scores(candidate, dense.learning_rate if dense else best)
        known = candidate.kind != "momentum" and len(pasted) == SEEDS
        return Row(
            self.workload,
            self.optimizer,
            self.workers,
            candidate.method,
            best,
            len(tried),
            score=statistics.fmean(same),
            spread=max(same) - min(same),
            lost=_lost(self.workload, statistics.fmean(same), dense),
            fewer_bytes=result.dense_bytes / result.sent_bytes,
            seeds=len(same),
            pasted=_lost(self.workload, statistics.fmean(pasted), dense) if known else None,
        )


def trials(
    done: Sequence[Done],
    workloads: Sequence[Name],
    optimizers: Sequence[OptimizerName],
    workers: int,
    methods: Sequence[str] | None = None,
) -> list[Trial]:
    """What is to be trained next, given what was: a trial of every method that is not settled, or of some alone.

    A method begins at its learning rate, tries half and twice it, and goes on to the better side while that helps;
    then the best rate is trained with the other seeds, and so is the first one, which who pastes a line has. Dense
    averages come first, since the others begin at theirs.
    """
    results = {each.trial: each.result for each in done}
    wanted: list[Trial | None] = []
    for workload, optimizer in itertools.product(workloads, optimizers):
        if optimizer == "muon" and not by_loss(workload):
            continue  # convolutions are no matrices
        column = Column(results, workload, optimizer, workers)
        dense, *others = candidates(optimizer)
        first = column.next(dense, base_rate(WORKLOADS[workload], optimizer), tuned=True)
        if first is not None:
            wanted.append(first)
            continue
        best = column.best(dense)
        wanted += [column.next(each, best * each.rate) for each in others if methods is None or each.method in methods]
    return [each for each in wanted if each is not None]


def train(trial: Trial) -> Done:
    """Runs a trial."""
    return Done(trial, run(trial, STEPS[trial.workload], lambda step: None))


def rows(done: Sequence[Done]) -> list[Row]:
    """A row for every method that is settled, cell by cell, dense averages first, then fewest bytes first."""
    results = {each.trial: each.result for each in done}
    found: list[Row] = []
    for cell in sorted({_cell(each.trial) for each in done}, key=_place):
        column, here = Column(results, *cell), list[Row]()
        for each in candidates(column.optimizer):
            if (row := column.row(each, here[0] if here else None)) is not None:
                here.append(row)
        found += [*here[:1], *sorted(here[1:], key=lambda row: -row.fewer_bytes)]
    return found


def load(path: Path) -> list[Done]:
    """Trainings that an earlier run left, or none.

    Raises:
        ConfigurationError: If the file is not of this kind, or its trainings had other numbers of steps.
    """
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        done = [
            Done(Trial(**each["trial"]), Result(**{**each["result"], "loss": float(each["result"]["loss"])}))
            for each in content["trainings"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} does not hold trainings of gradwire bench recipes; choose another file"
        ) from error
    if (steps := content.get("steps")) != STEPS:
        raise ConfigurationError(
            f"{path} holds trainings of {steps or 'unknown numbers of'} steps, not {STEPS}; choose another file"
        )
    return done


def plain(done: Sequence[Done]) -> list[dict[str, Any]]:
    """Trainings for a JSON, in which an infinite loss is a text."""
    found = []
    for each in done:
        result: dict[str, Any] = asdict(each.result)
        if not math.isfinite(each.result.loss):
            result["loss"] = "inf"
        found.append({"trial": asdict(each.trial), "result": result})
    return found


def _cell(trial: Trial) -> Cell:
    own = {each.method for each in CANDIDATES if each.kind == "momentum"}
    return trial.workload, "momentum" if trial.method in own else trial.optimizer, trial.workers


def _place(cell: Cell) -> tuple[int, int, int]:
    workload, optimizer, workers = cell
    return list(STEPS).index(workload), get_args(OptimizerName).index(optimizer), workers


def _lost(workload: Name, score: float, dense: Row | None) -> float:
    if dense is None:
        return 0.0
    return 100 * (score / dense.score - 1) if by_loss(workload) else dense.score - score


def _score(workload: Name, result: Result) -> float:
    return result.loss if by_loss(workload) else 100 * result.accuracy


def line(method: str) -> str:
    """What to paste for a method."""
    if (periods := Periods.parse(method)) is not None:
        return periods.line
    contender = Contender.parse(method)
    if contender.name == DDP:
        return "DistributedDataParallel(net)"
    options = "".join(f", {option}={value!r}" for option, value in contender.options)
    return f'gradwire.compress(model, "{contender.name}"{options})'
