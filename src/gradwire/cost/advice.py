"""Every sensible way to average a model's gradients on a network, the fastest of them, or that it does not pay."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.cost.simulation import Prediction, Setting, plain, simulate
from gradwire.engine.automatic import AMONG
from gradwire.engine.configuration import Configuration
from gradwire.methods import get, parse
from gradwire.units import rounded

GAIN = 0.05
"""A method must take less of a step than the best dense average by this share, beyond what is uncertain, to be worth
what compression does to training."""

ALIKE = 0.02
"""Of methods whose steps take the same but for this share, the one that changes training least is taken."""

DENSE = "bf16"

METHODS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("bf16", {}),
    ("natural", {}),
    ("qsgd", {"bits": 4}),
    ("loco", {}),
    ("subspace", {"bits": 0.8}),
    ("powersgd", {"rank": 4}),
    ("deadzone", {"bits": 0.1}),
    ("acpsgd", {"rank": 4}),
    ("topk", {"ratio": 0.01}),
    ("efsignsgd", {}),
    ("dgc", {"ratio": 0.001}),
    ("randomk", {"ratio": 0.01}),
)
"""Methods that are tried, those first that change training least. Of these :data:`AMONG` may be recommended: what was
measured to keep the accuracy under some optimizer. The others show what they would take."""

GRANULARITIES = ("layer", "bucket")
"""At which methods are tried, beside their own."""

CHOICES = ("granularity", "route", "memory", "owner", "inside", "fuse_bytes")
"""What is not a method's own among a candidate's arguments."""


@dataclass(frozen=True)
class Candidate:
    """A way to average.

    Attributes:
        name: A method.
        arguments: What else :func:`gradwire.compress` is given.
        configuration: The same, checked.
        eligible: Whether it may be recommended.
    """

    name: str
    arguments: Mapping[str, Any]
    configuration: Configuration
    eligible: bool = True

    @classmethod
    def make(cls, name: str, arguments: Mapping[str, Any], eligible: bool = True) -> Candidate:
        """Checks the choices.

        Raises:
            ConfigurationError: If they cannot be.
        """
        choices = {key: value for key, value in arguments.items() if key in CHOICES}
        options = {key: value for key, value in arguments.items() if key not in choices}
        return cls(name, arguments, Configuration.make(name, options, **choices), eligible)

    @classmethod
    def of(cls, line: str, configuration: Configuration) -> Candidate:
        """As it was written, already checked."""
        name, arguments = parse(line)
        return cls(name, arguments, configuration)

    @property
    def label(self) -> str:
        """As on the command line."""
        given = ",".join(f"{key}={value}" for key, value in self.arguments.items())
        return f"{self.name}:{given}" if given else self.name

    @property
    def line(self) -> str:
        """What to paste."""
        given = "".join(f", {key}={value!r}" for key, value in self.arguments.items())
        return f'handle = gradwire.compress(model, "{self.name}"{given})'


def candidates(node: int = 1) -> list[Candidate]:
    """Every method of :data:`METHODS` at its granularities and on its routes, the usual ones unsaid.

    Args:
        node: Workers of a node; where there are several, also with averages of each node's first.
    """
    return [
        Candidate.make(name, arguments | inside, get(name).bias == "exact" or _was_measured(name, arguments))
        for name, options in METHODS
        for arguments in _ways(name, dict(options))
        for inside in ([{}, {"inside": node}] if node > 1 and get(name).bias != "exact" else [{}])
    ]


def _was_measured(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether it is a line of :data:`AMONG`, on whatever route, or one with the usual segments in place of buckets."""

    def own(given: Mapping[str, Any]) -> dict[str, Any]:
        return {key: each for key, each in given.items() if key not in ("granularity", "route")}

    return any(
        name == known
        and own(arguments) == own(given)
        and arguments.get("granularity") in (None, given.get("granularity"))
        for known, given in map(parse, AMONG)
    )


def _ways(name: str, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    kind = get(name)
    exact = kind.bias == "exact"
    own, *others = kind.granularities
    for scope in [own] if exact else [own, *(each for each in GRANULARITIES if each in others)]:
        for route in kind.routes:
            if route == "gather" and "owner" in options:
                continue
            arguments = dict(options)
            if scope != own:
                arguments["granularity"] = scope
            if route != kind.routes[0]:
                arguments["route"] = route
            yield arguments


@dataclass(frozen=True)
class Advice:
    """What to do.

    Attributes:
        rows: All predictions, DDP in float32 first.
        chosen: The best candidate; None if compression does not pay.
        reason: Why, in a sentence or two.
        line: What to paste.
    """

    rows: tuple[Prediction, ...]
    chosen: Candidate | None
    reason: str
    line: str


def advise(setting: Setting, tried: Sequence[Candidate] | None = None) -> Advice:
    """Predicts a step of each candidate and chooses."""
    tried = candidates() if tried is None else tried
    full = plain(setting)
    rows = [simulate(each.configuration, setting, each.label) for each in tried]
    return choose(full, list(zip(tried, rows, strict=True)), setting.slowest * setting.workload.seconds)


def choose(full: Prediction, rows: Sequence[tuple[Candidate, Prediction]], computed: float) -> Advice:
    """The fastest that surely gains, or the better of the dense averages.

    Args:
        full: DDP's own average.
        rows: Candidates, those first that change training least, and their steps.
        computed: Seconds of a step without averages.
    """
    halved = [(each, row) for each, row in rows if each.configuration.method.bias == "exact"]
    best_dense = min([full, *(row for _, row in halved)], key=lambda row: row.seconds)
    dense = next((each for each, row in halved if row is best_dense), None)
    predictions = tuple([full, *(row for _, row in rows)])
    gaining = [
        (each, row)
        for each, row in rows
        if each.configuration.method.bias != "exact"
        and row.seconds < (1 - GAIN) * best_dense.seconds
        and row.high < best_dense.low
    ]
    eligible = [(each, row) for each, row in gaining if each.eligible]
    if not eligible:
        hidden = best_dense.seconds <= 1.05 * computed
        known = "average that was measured to keep the accuracy" if gaining else "compressed average"
        why = "the network hides behind backward" if hidden else f"no {known} is surely faster"
        name = "plain DDP" if dense is None else f"{dense.name} DDP"
        line = "# nothing to change" if dense is None else dense.line
        return Advice(predictions, dense, f"Stay with {name}: {_but(why, gaining, best_dense)}.", line)
    quickest = min(row.seconds for _, row in eligible)
    chosen, row = next((each, row) for each, row in eligible if row.seconds <= (1 + ALIKE) * quickest)
    gain, of_full = best_dense.seconds / row.seconds, full.seconds / row.seconds
    reason = (
        f"{chosen.label} takes {as_text(row.seconds)} a step, {as_text(best_dense.seconds)} the best dense average: "
        f"{gain:.2f} times as fast, {of_full:.2f} times {full.label}"
    )
    return Advice(
        predictions, chosen, f"{_but(reason, gaining, row)}. Compare accuracy before you rely on it.", chosen.line
    )


def _but(reason: str, gaining: Sequence[tuple[Candidate, Prediction]], chosen: Prediction) -> str:
    """A reason, and what it leaves out."""
    faster = [(each, row) for each, row in gaining if row.seconds < (1 - ALIKE) * chosen.seconds]
    if not faster:
        return reason
    each, row = min(faster, key=lambda pair: pair[1].seconds)
    return f"{reason}; {each.label} would take {as_text(row.seconds)}, but was not measured to keep the accuracy"


def as_text(seconds: float) -> str:
    """Seconds of a step, readably."""
    return f"{rounded(1e3 * seconds, 3)} ms" if seconds < 1 else f"{rounded(seconds, 3)} s"


def as_plain(prediction: Prediction) -> dict[str, Any]:
    """A prediction without its drawing, for JSON."""
    return {each.name: getattr(prediction, each.name) for each in dataclasses.fields(prediction) if each.name != "work"}
