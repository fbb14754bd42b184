"""Every method of the catalogue, side by side: what it is, what it writes, how fast, and how far off it is."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gradwire
from gradwire.cost.measure import one_thread
from gradwire.engine.configuration import Configuration
from gradwire.granularity import Granularity
from gradwire.layout import Slot, flat_slots
from gradwire.local.world import LocalWorld, Step
from gradwire.methods import CodecMethod, Method
from gradwire.methods.families import FAMILIES, OTHERS, family_of
from gradwire.methods.published import CHOICES
from gradwire.policy import DensePolicy
from gradwire_bench.gradients import Recording

WORKERS = 4
"""Payloads that are decoded and averaged."""

WARM_UP_STEPS = 2
"""Steps before the clock runs: pages are touched, thresholds settle."""

TIMED_STEPS = 4

SECONDS = 3.0
"""How long steps to warm up may take, and how much later than the first that is timed another may begin."""

LEARNING: Mapping[str, Mapping[str, Any]] = {"gradiveq": {"learn_steps": 1}}
"""With what options methods are timed that average densely while they learn: so that they have learnt."""

SIDE = 1000
"""Of the matrix for which sizes and bounds are told."""

COMPILED_SIDE = 128
"""Side of the matrix whose average has a method's kernels compiled."""

APART = 4099
"""Elements between the places in one stretch of noise from which gradients are taken."""

SPARSE: Mapping[str, Mapping[str, Any]] = {
    "threshold": {"threshold": 5.0},
    "strom": {"threshold": 5.0},
    "hybrid": {"threshold": 5.0},
    "variance": {"alpha": 3.8},
}
"""With what options methods are timed that send as many coordinates as the gradient asks for.

Of normal noise they send about 1 % then; with their defaults, which suit real gradients, nearly everything or nothing.
"""

Progress = Callable[[int, int, str], None]
"""Told how many methods are done, how many there are, and which is next."""


@dataclass(frozen=True)
class Entry:
    """What a method says of itself.

    Attributes:
        name: Its name.
        family: What it sends, in a word or two.
        summary: What it does, in a line.
        about: The rest of what its class says of it, in paragraphs.
        bias: Exact, unbiased, contractive or biased.
        routes: Its routes, the usual one first.
        granularities: Its granularities, the usual one first.
        memory: Its usual memory.
        memories: What it can carry.
        options: Its hyper-parameters with the defaults.
        needs: Those that have none, without which there are neither bits nor a bound.
        option_texts: What each is, and its range.
        wire_bits: The formula of what a segment takes there and back.
        learning_bits: The same of steps in which it learns, if there are such.
        bits: What wire_bits is for a value of a matrix of :data:`SIDE` by :data:`SIDE`; None where it declares none.
        bound: The most that the error can be for that, ``E |Q(x) - x|^2 / |x|^2``; None if there is no bound.
        citation: Authors, year, arXiv id.
        published: What ``preset="paper"`` takes that the defaults do not, each with the default.
        note: Why, and what of the publication is otherwise here or not at all.
    """

    name: str
    family: str
    summary: str
    about: str
    bias: str
    routes: tuple[str, ...]
    granularities: tuple[str, ...]
    memory: str
    memories: tuple[str, ...]
    options: dict[str, Any]
    needs: tuple[str, ...]
    option_texts: dict[str, str]
    wire_bits: str
    learning_bits: str
    bits: float | None
    bound: float | None
    citation: str
    published: dict[str, tuple[str, str]]
    note: str


@dataclass(frozen=True)
class Measurement:
    """What a method was seen to do, with its usual route and memory, in a world of four workers.

    Attributes:
        name: The method.
        bits: Bits a worker writes for an element of the gradient, all rounds together.
        encode_gbps: Gradient bytes a second, in units of 1e9, until the first payload is written.
        decode_gbps: The same from the first answer to the average.
        error: ``|average - mean|^2 / |mean|^2`` of one step on real gradients, without a memory; None if not measured.
    """

    name: str
    bits: float
    encode_gbps: float
    decode_gbps: float
    error: float | None


def entries(names: Sequence[str] = ()) -> list[Entry]:
    """The catalogue family by family, or some of it as given."""
    own = [name for name in gradwire.methods.names() if family_of(name) == OTHERS]
    found = []
    for name in names or [name for family in FAMILIES.values() for name in family] + own:
        kind = gradwire.methods.get(name)
        needs = _needs(kind)
        bits, bound = (math.nan, math.inf) if needs else _declared(gradwire.methods.make(name, {}))
        summary, _, about = _docstring(kind)[0].partition("\n")
        found.append(
            Entry(
                name=name,
                family=family_of(name),
                summary=summary,
                about=about.strip(),
                bias=kind.bias,
                routes=kind.routes,
                granularities=kind.granularities,
                memory=str(kind.memory),
                memories=kind.memories,
                options={field.name: _default(field) for field in _fields(kind) if field.name not in needs},
                needs=needs,
                option_texts=_option_texts(kind),
                wire_bits=kind.wire_bits,
                learning_bits=kind.learning_bits,
                bits=None if math.isnan(bits) else bits / SIDE**2,
                bound=bound if math.isfinite(bound) else None,
                citation=kind.citation,
                published={} if needs else _published(name),
                note=kind.published.note,
            )
        )
    return found


def _needs(kind: type[Method]) -> tuple[str, ...]:
    """A method's options without a default; none of what is no dataclass, which cannot be made."""
    fields: list[dataclasses.Field[Any]] = _fields(kind) if dataclasses.is_dataclass(kind) else []
    return tuple(field.name for field in fields if _default(field) is dataclasses.MISSING)


def _declared(method: Method) -> tuple[float, float]:
    """Bits and bound of a matrix of :data:`SIDE` by :data:`SIDE`: NaN and infinite where none are declared."""
    most = Granularity.parse(method.granularities[0]).most
    return method.declared_bits(SIDE, SIDE), method.error_bound(min(SIDE * SIDE, most))


def _docstring(kind: type) -> tuple[str, str]:
    """What a class says of itself, and of its attributes."""
    said = kind.__doc__ or ""
    if said.startswith(f"{kind.__name__}("):  # a dataclass without one has its signature
        said = ""
    about, _, attributes = inspect.cleandoc(said).replace("``", "").partition("\nAttributes:\n")
    return about, attributes


def _fields(kind: type[Method]) -> list[dataclasses.Field[Any]]:
    """A method's options, its own before those that it has in common with others."""
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    names = [name for each in kind.__mro__ for name in inspect.get_annotations(each) if name in fields]
    return [fields[name] for name in dict.fromkeys(names)]


def _option_texts(kind: type[Method]) -> dict[str, str]:
    """Name to text, from the sections on attributes of a class and of those that it inherits from."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        told = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", _docstring(each)[1], re.MULTILINE)
        found |= {name: " ".join(text.split()) for name, text in told}
    return {field.name: found[field.name] for field in _fields(kind) if field.name in found}


def measure(
    names: Sequence[str],
    numel: int,
    recording: Recording | None = None,
    progress: Progress = lambda done, total, name: None,
) -> list[Measurement]:
    """Runs each method for some steps on one thread: :data:`WARM_UP_STEPS`, then :data:`TIMED_STEPS`.

    Kernels are compiled beforehand. No step begins later than :data:`SECONDS` after the first that is timed, and what
    takes longer than that to warm up is judged by the last step of it. Noise is drawn once. Every worker in
    every step takes its gradient from another place in it, so no coordinate sees a number twice.

    Args:
        names: The methods.
        numel: Elements of the square matrix that is timed, rounded up to whole rows.
        recording: Real gradients of each worker, to tell the error on.
        progress: Called before each method and after the last.
    """
    side = math.isqrt(numel - 1) + 1
    slots = flat_slots([("weight", (side, side))])
    places = WORKERS * (WARM_UP_STEPS + TIMED_STEPS)
    noise = torch.randn(slots[-1].stop + APART * places, generator=torch.Generator().manual_seed(0))
    found = []
    with one_thread():
        for done, name in enumerate(names):
            progress(done, len(names), name)
            error = None if recording is None else _error(gradwire.methods.get(name)(), recording)
            found.append(_timed(name, slots, noise, error))
        progress(len(names), len(names), "")
    return found


def _timed(name: str, slots: Sequence[Slot], noise: Tensor, error: float | None) -> Measurement:
    method = gradwire.methods.get(name)(**SPARSE.get(name, {}), **LEARNING.get(name, {}))
    few = flat_slots([("weight", (COMPILED_SIDE, COMPILED_SIDE))])
    compiled = _world(method, few, None)
    for _ in range(WARM_UP_STEPS):
        compiled.average(list(noise[: WORKERS * few[-1].stop].view(WORKERS, -1).clone()))
    world = _world(method, slots, None)
    numel = slots[-1].stop
    gradients = [torch.empty(numel) for _ in range(WORKERS)]
    begins = itertools.count(0, APART)

    def steps(most: int, least: int = 1) -> Iterator[Step]:
        start = time.perf_counter()
        for done in range(most):
            if done >= least and time.perf_counter() - start > SECONDS:
                return
            for gradient in gradients:
                gradient.copy_(noise[(first := next(begins)) : first + numel])
            yield world.average(gradients)

    start = time.perf_counter()
    warm = list(steps(WARM_UP_STEPS, least=WARM_UP_STEPS))
    timed = list(steps(TIMED_STEPS)) if time.perf_counter() - start <= SECONDS else warm[-1:]
    gigabytes = 4e-9 * numel
    return Measurement(
        name=name,
        bits=8 * statistics.mean(step.written_bytes for step in timed) / numel,
        encode_gbps=gigabytes / statistics.median(step.encode_seconds for step in timed),
        decode_gbps=gigabytes / statistics.median(step.decode_seconds for step in timed),
        error=error,
    )


def _error(method: Method, recording: Recording) -> float:
    """Of the first step, compressed tensors only."""
    flat = [each.clone() for each in (recording.values, *recording.others)]
    mean = torch.stack(flat).double().mean(0)
    _world(method, recording.slots, "none").average(flat)
    return float((flat[0] - mean).square().sum() / mean.square().sum())


def _world(method: Method, slots: Sequence[Slot], memory: str | None) -> LocalWorld:
    everything = DensePolicy(below=0, vectors=False)
    if memory not in method.memories:
        memory = None
    return LocalWorld(Configuration.make(method, {}, memory=memory, dense=everything), slots, WORKERS)


def _published(name: str) -> dict[str, tuple[str, str]]:
    """What a preset changes: what was published, and the default."""
    usual = Configuration.make(name, {})
    paper = Configuration.make(name, {"preset": "paper"})
    changed = gradwire.methods.get(name).published.settings
    return {setting: (_chosen(paper, setting), _chosen(usual, setting)) for setting in changed}


def _chosen(configuration: Configuration, setting: str) -> str:
    """One choice, as in a call."""
    method = configuration.method
    if setting == "owner" and configuration.owner is None and isinstance(method, CodecMethod):
        return repr(method.owner_codec(configuration.route))
    chosen = getattr(configuration, setting, None) if setting in CHOICES else getattr(method, setting)
    return repr(str(chosen) if setting in CHOICES and setting != "owner" else chosen)


def _default(field: dataclasses.Field[Any]) -> Any:
    """What an option is where nobody gives it; ``dataclasses.MISSING`` where it has to be given."""
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()
