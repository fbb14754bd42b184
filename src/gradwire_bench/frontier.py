"""Bits against error of methods on recorded gradients, beside the curves that no coder of single values gets below."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradwire.engine.configuration import Configuration
from gradwire.layout import Float64Array
from gradwire.local.world import LocalWorld
from gradwire.policy import DensePolicy
from gradwire_bench.contenders import Contender
from gradwire_bench.gradients import Recording

DEADZONE = "deadzone"

LADDER = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0)
"""Bits a value at which our own codec is measured."""

GRANULARITIES = ("layer", "model")
"""Where methods have both."""

CONTENDERS = (
    *("topk:ratio=0.001", "topk:ratio=0.01", "topk:ratio=0.05", "topk:ratio=0.25"),
    *("topk:ratio=0.001,values=qsgd:4,indices=entropy", "topk:ratio=0.01,values=qsgd:4,indices=entropy"),
    *("topk:ratio=0.05,values=qsgd:4,indices=entropy", "topk:ratio=0.05,values=sign", "randomk:ratio=0.01"),
    *("sidco:ratio=0.01", "sketchml:ratio=0.05", "adacomp", "efsignsgd", "onebit", "terngrad", "3lc"),
    *("qsgd:bits=2", "qsgd:bits=4", "qsgd:bits=8", "nuqsgd", "natural", "eightbit", "inceptionn", "thc", "qgz"),
    *("eden:bits=1", "eden:bits=2", "eden:bits=4", "powersgd:rank=1", "powersgd:rank=4", "powersgd:rank=16"),
    *("powersgd:rank=1,bits=16", "powersgd:rank=4,bits=16"),
    *("dithered:bits=2", "dithered:bits=4"),
    *("subspace:bits=0.02", "subspace:bits=0.1", "subspace:bits=0.5", "subspace:bits=2"),
)

WARM_UP_STEPS = 2
"""Steps with gradients of other batches before the one that counts: rooms settle, and methods learn subspaces."""

LADDER_OF_LEVELS = 2.0 ** np.arange(4, -27, -1.0)
"""Water levels, relative to the mean square of all values."""

TIGHT_BITS = 2.5
"""A layer's bits a value from which on Shannon's lower bound stands for its curve."""

ITERATIONS = 150
"""Of Blahut and Arimoto's algorithm."""


@dataclass(frozen=True)
class Curve:
    """A bound, from many bits to few.

    Attributes:
        bits: A value.
        errors: The least squared error, as a share of the gradient's own square.
    """

    bits: list[float]
    errors: list[float]

    def error(self, bits: float) -> float:
        """At so many bits, linear in decibels between those at hand."""
        return float(10 ** np.interp(bits, self.bits[::-1], np.log10(self.errors[::-1])))


@dataclass(frozen=True)
class Point:
    """A method on a recording.

    Attributes:
        recording: Its name.
        method: The method with its options.
        granularity: Where its segments end.
        bits: What a worker writes for a value.
        error: The squared error, as a share of the gradient's square.
        decibels: Above the bound of values by themselves at as many bits.
        gaussian_decibels: The same of the bound of Gaussian layers.
    """

    recording: str
    method: str
    granularity: str
    bits: float
    error: float
    decibels: float
    gaussian_decibels: float


@dataclass(frozen=True)
class Frontier:
    """A recording's bounds and points.

    Attributes:
        recording: Its name.
        numel: Its values.
        bound: The least error of any coder that knows how often each value comes in each layer, and no more.
        gaussian: The same if the values of each layer were Gaussian of its variance: reverse water-filling.
        points: All methods.
    """

    recording: str
    numel: int
    bound: Curve
    gaussian: Curve
    points: list[Point]


def measure(
    recordings: Sequence[Recording], contenders: Sequence[Contender], progress: Callable[[int, int, str], None]
) -> list[Frontier]:
    """Every contender in every granularity it has of :data:`GRANULARITIES`, without a memory, and both bounds.

    Args:
        recordings: The gradients.
        contenders: The methods.
        progress: Told how many measurements are done, how many there are, and which is next.
    """
    plans = [(each, scope) for each in contenders for scope in GRANULARITIES if scope in _kind(each).granularities]
    total, done, found = len(recordings) * (len(plans) + 1), itertools.count(), []
    for recording in recordings:
        progress(next(done), total, f"{recording.name}: bounds")
        layers, points = recording.layers(), []
        bound, gaussian = empirical_bound(layers), gaussian_bound(layers)
        for contender, scope in plans:
            progress(next(done), total, f"{recording.name}: {contender.label}")
            bits, error = measured(recording, contender, scope)
            above = [10 * math.log10(max(error, 1e-20) / curve.error(bits)) for curve in (bound, gaussian)]
            points.append(Point(recording.name, contender.label, scope, bits, error, *above))
        found.append(Frontier(recording.name, len(recording.values), bound, gaussian, points))
    return found


def contenders() -> list[Contender]:
    """:data:`CONTENDERS`, and our own codec at :data:`LADDER`."""
    return [Contender.parse(each) for each in (*CONTENDERS, *(f"{DEADZONE}:bits={bits}" for bits in LADDER))]


def gaussian_bound(layers: Sequence[Float64Array]) -> Curve:
    """Reverse water-filling: a layer is told down to one level of error, or not at all (Cover and Thomas, 10.3.3)."""
    return _curve(layers, _gaussian)


def empirical_bound(layers: Sequence[Float64Array]) -> Curve:
    """The same over each layer's own distribution, its values taken one by one, both signs being as likely.

    By Blahut and Arimoto's algorithm up to :data:`TIGHT_BITS`. Above, by Shannon's lower bound for values other than
    zero, and by how often there are any.
    """
    others = {id(layer): np.abs(layer[layer != 0]) for layer in layers}
    found = {key: differential_entropy(each) for key, each in others.items()}

    def tell(layer: Float64Array, level: float) -> tuple[float, float]:
        there, entropy = len(others[id(layer)]) / len(layer), found[id(layer)]
        if (bits := 1 + entropy - 0.5 * math.log2(2 * math.pi * math.e * level)) <= TIGHT_BITS:
            return blahut_arimoto(layer, level)
        zeros = sum(-share * math.log2(share) for share in (there, 1 - there) if share)
        return zeros + there * bits, there * level

    return _curve(layers, tell)


def _gaussian(layer: Float64Array, level: float) -> tuple[float, float]:
    variance = float(np.square(layer).mean())
    return max(0.5 * math.log2(variance / level), 0.0) if variance else 0.0, min(level, variance)


def _curve(layers: Sequence[Float64Array], tell: Callable[[Float64Array, float], tuple[float, float]]) -> Curve:
    numel, square = sum(map(len, layers)), sum(float(np.square(layer).sum()) for layer in layers)
    bits, errors = [], []
    for level in LADDER_OF_LEVELS[::-1] * square / numel:
        told = [(len(layer), *tell(layer, float(level))) for layer in layers]
        bits.append(sum(count * each for count, each, _ in told) / numel)
        errors.append(sum(count * each for count, _, each in told) / square)
    return Curve(bits, errors)


def differential_entropy(values: Float64Array) -> float:
    """In bits, by the distances of values a few places apart in order (Vasicek 1976; at the ends Ebrahimi et al. 1994).

    Minus infinity for none.
    """
    if not len(values):
        return -math.inf
    ordered, window = np.sort(values), max(round(len(values) ** (1 / 3)), 1)
    place = np.arange(len(values))
    low, high = np.maximum(place - window, 0), np.minimum(place + window, len(values) - 1)
    density = np.maximum(high - low, 1) / len(values) / np.maximum(ordered[high] - ordered[low], np.finfo(float).tiny)
    return float(-np.log2(density).mean())


def blahut_arimoto(layer: Float64Array, level: float) -> tuple[float, float]:
    """Bits a value and squared error where one bit less would cost as at a water level (Blahut 1972).

    On magnitudes at points that lie a third of the level's root apart, or 2 % where that is more, and both signs.
    """
    magnitudes, grain = np.abs(layer), math.sqrt(level) / 3
    edges = [0.0, grain / 2]
    while edges[-1] < magnitudes.max():
        edges.append(edges[-1] + max(grain, edges[-1] / 50))
    counts, _ = np.histogram(magnitudes, edges)
    sums, _ = np.histogram(magnitudes, edges, weights=magnitudes)
    there = counts > 0
    share, points = counts[there] / len(layer), sums[there] / counts[there]
    sent = np.concatenate((-points[::-1], [0.0], points))
    square = (points[:, None] - sent) ** 2
    likely = np.exp(-(square - square.min(1, keepdims=True)) / (2 * level))
    chance = np.full(len(sent), 1 / len(sent))
    for _ in range(ITERATIONS):
        ratio = (share / (likely @ chance)) @ likely
        chance = chance * (ratio + ratio[::-1]) / 2
    given = likely * chance
    total = given.sum(1, keepdims=True)
    given /= total
    rate = -share @ np.log2(total[:, 0]) - share @ (given * (square - square.min(1, keepdims=True))).sum(1) / (
        2 * level * math.log(2)
    )
    return max(float(rate), 0.0), float(share @ (given * square).sum(1))


def _kind(contender: Contender) -> Any:
    from gradwire import methods

    return methods.get(contender.name)


def measured(recording: Recording, contender: Contender, granularity: str) -> tuple[float, float]:
    """Bits a value and error of the last of some steps without a memory; one way, where a method can be gathered."""
    kind = _kind(contender)
    route = "gather" if "gather" in kind.routes else kind.routes[0]
    memory = "none" if "none" in kind.memories else None
    everything = DensePolicy(below=0, vectors=False)
    choices = Configuration.make(contender.name, dict(contender.options), granularity, route, memory, dense=everything)
    world = LocalWorld(choices, recording.slots, 1)
    for values in (*recording.others, recording.values):
        average = values.clone()
        step = world.average([average])
    error = (average - recording.values).double().square().sum() / recording.values.double().square().sum()
    return 8 * step.written_bytes / len(average), float(error)


def best_others(frontier: Frontier) -> Iterator[tuple[Point, float]]:
    """Every other method's points, with the bits that our own codec takes for their error; NaN beyond its ladder."""
    own = sorted((each for each in frontier.points if _is_own(each)), key=lambda each: each.error)
    errors, bits = np.log10([each.error for each in own]), np.log10([each.bits for each in own])
    for each in frontier.points:
        if not each.method.startswith(DEADZONE):
            level = math.log10(max(each.error, 1e-20))
            inside = errors[0] <= level <= errors[-1]
            yield each, float(10 ** np.interp(level, errors, bits)) if inside else math.nan


def _is_own(point: Point) -> bool:
    return point.method.startswith(DEADZONE) and point.granularity == "model"
