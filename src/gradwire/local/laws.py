"""The laws of the house, held against one method: yours, in one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from gradwire.engine.change import owed_of
from gradwire.engine.choices import Choices
from gradwire.engine.configuration import Configuration
from gradwire.engine.guards.rollback import Rollback
from gradwire.errors import GradwireError
from gradwire.granularity import Granularity
from gradwire.kernels import dispatch
from gradwire.layout import flat_slots
from gradwire.local.alone import roundtrip
from gradwire.local.findings import BrokenError, Finding, SilentError
from gradwire.local.positions import positions_as_written
from gradwire.local.world import LocalWorld
from gradwire.memory import NoMemory, Residual
from gradwire.methods import Method
from gradwire.methods.method import Bias
from gradwire.policy import DensePolicy
from gradwire.surroundings import as_on_the_wire

SLOTS = flat_slots([("filter", (16, 8, 3, 3)), ("matrix", (40, 67)), ("bias", (40,)), ("tall", (300, 9))])
SMALL: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (7,), (3, 1), (2, 1, 3), (0, 4))
WORKERS = (2, 3, 4)
STEPS = 4
DRAWS = 400
SEVERAL = 3
SPREAD = {1: 1.25, SEVERAL: 2.0}
"""How many times the variance of a mean its squared error may be, by workers."""
SIDE = 64
EVERYTHING = DensePolicy(below=0, vectors=False)


@dataclass(frozen=True)
class Check:
    """What came of a check.

    Attributes:
        configuration: What was checked.
        findings: Every law.
    """

    configuration: Configuration
    findings: tuple[Finding, ...]

    @property
    def holds(self) -> bool:
        """Whether no law is broken."""
        return all(each.holds is not False for each in self.findings)

    def __str__(self) -> str:
        marks = {True: "holds", False: "BROKEN", None: "-"}
        lines = [f"{marks[each.holds]:8}{each.law}{f': {each.said}' if each.said else ''}" for each in self.findings]
        return "\n".join([str(self.configuration), *lines])


Law = Callable[[Configuration], None]
"""Raises where it does not hold."""


@as_on_the_wire()
def check(method: str | Method, **choices: Any) -> Check:
    """Holds the laws that every method keeps, and those that it declares of itself, against what a method does.

    Each in worlds of some workers in this process, on noise: that a payload has one size on all ranks, that all ranks
    have the same bits, that nothing but gradients, seed and step decides, that averages and residuals add up to the
    mean, that values which are not finite reach all ranks and no memory, that a restart gives the same bits, that all
    shapes it accepts work, that positions are read as they were written, and its class (``bias``), bound
    (``error_bound``) and size (``wire_bits``) as declared.

    Args:
        method: A name of ``gradwire.methods.names()``, also with its options as text, or a method object.
        **choices: The method's options, and ``granularity``, ``route``, ``memory`` and ``owner``, as
            :func:`gradwire.compress` takes them.

    Returns:
        A finding for each law; printed it is a line for each.

    Raises:
        ConfigurationError: If anything cannot be as asked.

    Example:
        >>> check("topk", ratio=0.1).holds
        True
    """
    names = {"granularity", "route", "memory", "owner", "dense", "seed"} & choices.keys()
    options = {name: value for name, value in choices.items() if name not in names}
    chosen = Configuration.of(method, options, Choices(**{name: choices[name] for name in names}))
    dispatch.overrides("cpu")  # what is amiss with it is no fault of the method
    laws: dict[str, Law] = {
        "every rank has the same bits": same_bits,
        "nothing but gradients, seed and step decides": private_randomness,
        "averages and what is owed add up to the mean": conserved,
        "what is not finite reaches every rank and no memory": not_finite,
        "a restart gives the same bits": restarts,
        "all shapes that it accepts": any_shape,
        "positions are read as they were written": positions_as_written,
        f"{chosen.method.bias}, as declared": class_as_declared,
        "the error is within its bound, as declared": bound,
        "the size is as declared": size,
    }
    findings: list[Finding] = []
    for law, held in laws.items():
        found = _finding(law, partial(held, chosen))
        before = next((each.law for each in findings if found.said and each.said == found.said), None)
        findings.append(found if before is None else replace(found, said=f"as in: {before}"))
    return Check(chosen, tuple(findings))


def _finding(law: str, held: Callable[[], None]) -> Finding:
    try:
        held()
    except SilentError as silent:
        return Finding(law, None, str(silent))
    except GradwireError as broken:
        return Finding(law, False, str(broken))
    except Exception as error:
        return Finding(law, False, f"{type(error).__name__}: {error}")
    return Finding(law, True, "")


def _noise(workers: int, step: int) -> list[Tensor]:
    """Gradients of all workers."""
    seeds = (1000 * step + rank for rank in range(workers))
    return [torch.randn(SLOTS[-1].stop, generator=torch.Generator().manual_seed(seed)) for seed in seeds]


def _averaged(world: LocalWorld, gradients: list[Tensor]) -> Tensor:
    """What rank 0 has, which all others must have too."""
    world.average(gradients)
    for rank, other in enumerate(gradients):
        differ = gradients[0].view(torch.int32) != other.view(torch.int32)
        for slot in SLOTS:
            if count := int(differ[slot.offset : slot.stop].sum()):
                raise BrokenError(
                    f"rank {rank} of {len(gradients)} has other averages than rank 0 in step "
                    f"{world.engines[0].step - 1}: {count} values of {slot.numel} of a tensor of shape {slot.shape}"
                )
    return gradients[0]


def same_bits(chosen: Configuration) -> None:
    """Raises BrokenError unless all ranks have the same bits."""
    for workers in WORKERS:
        world = LocalWorld(chosen, SLOTS, workers)
        for step in range(STEPS):
            _averaged(world, _noise(workers, step))


def private_randomness(chosen: Configuration) -> None:
    """Raises BrokenError if something else than gradients, seed and step decides."""
    before = torch.get_rng_state()
    worlds = [LocalWorld(chosen, SLOTS, 2) for _ in range(2)]
    for step in range(STEPS):
        first = _averaged(worlds[0], _noise(2, step))
        if not torch.equal(torch.get_rng_state(), before):
            raise BrokenError("it draws from torch's own generator; draw from state.generator(), or from a key")
        if not torch.equal(first, _averaged(worlds[1], _noise(2, step))):
            raise BrokenError(f"the same gradients gave other averages in step {step} when they came again")


def conserved(chosen: Configuration) -> None:
    """Raises BrokenError if something is neither sent nor kept; SilentError if nothing says what is kept."""
    memory, own = chosen.memory, chosen.method.owed
    plain = isinstance(memory, Residual) and (memory.beta, memory.gamma, memory.dtype) == (1, 1, "float32")
    if chosen.method.why_no_mean or not (plain or (own and isinstance(memory, NoMemory))):
        raise SilentError("it has no residual that says what was not sent")
    if chosen.method.bias == "exact" and chosen.method.error_bound(1):
        raise SilentError("sums of workers are rounded on the way, which nobody keeps")
    for workers in WORKERS:
        world, balance = LocalWorld(chosen, SLOTS, workers), torch.zeros(SLOTS[-1].stop, dtype=torch.float64)
        for step in range(STEPS):
            gradients = _noise(workers, step)
            balance += torch.stack(gradients).double().mean(0)
            balance -= _averaged(world, gradients)
            if not plain and not any(
                world.engines[0].store.get(field, slot.name) is not None for field in own for slot in SLOTS
            ):
                raise SilentError("it has no residual that says what was not sent")
            for slot in SLOTS:
                owed = torch.zeros(slot.shape)
                for engine in world.engines:
                    found = owed_of(engine.store, slot, chosen, engine.rank, workers, None)
                    owed += torch.zeros(()) if found is None else found / workers
                off = float((balance[slot.offset : slot.stop] - owed.flatten()).abs().max())
                if off > 1e-4:
                    raise BrokenError(
                        f"with {workers} workers, after step {step}, they are off by {off:.3g} in a tensor of shape "
                        f"{slot.shape} of values of size 1: what was neither sent nor kept is lost"
                    )


def not_finite(chosen: Configuration) -> None:
    """Raises BrokenError if a value that is not finite is hidden from a rank, or stays."""
    for bad in (math.inf, math.nan):
        world = LocalWorld(chosen, SLOTS, 2)
        if chosen.method.rolls_back:
            for engine in world.engines:
                engine.guards.append(Rollback(engine, {slot.name: torch.float32 for slot in SLOTS}))
        for step in range(STEPS):
            gradients = _noise(2, step)
            if step == 1:
                gradients[1][SLOTS[1].stop - 1] = bad
            average = _averaged_bits(world, gradients)
            part = average[SLOTS[1].offset : SLOTS[1].stop] if chosen.granularity.scope == "layer" else average
            if step == 1 and part.isfinite().all():
                raise BrokenError(
                    f"one value of {bad} on rank 1 left an average that is finite, so no loss scaler sees it"
                )
            if step > 1 and not average.isfinite().all():
                raise BrokenError(f"averages were still not finite {step - 1} steps after one value of {bad}")


def _usual(chosen: Configuration, *options: str) -> None:
    """Raises SilentError if an option that the method has is not at its default, of which it declares."""
    for option in options:
        usual = getattr(type(chosen.method), option, None)
        if getattr(chosen.method, option, None) != usual:
            raise SilentError(f"it is declared of {option}={usual!r}")


def _averaged_bits(world: LocalWorld, gradients: list[Tensor]) -> Tensor:
    """As :func:`_averaged`, where one NaN is as good as another."""
    world.average(gradients)
    if not all(torch.equal(gradients[0].nan_to_num(), other.nan_to_num()) for other in gradients):
        raise BrokenError("ranks have other averages than one another once a value is not finite")
    return gradients[0]


def restarts(chosen: Configuration) -> None:
    """Raises BrokenError if a state lacks something."""
    world, other = (LocalWorld(chosen, SLOTS, 2) for _ in range(2))
    for step in range(2 * STEPS):
        if step == STEPS:
            for fresh, saved in zip(other.engines, world.engines, strict=True):
                fresh.go_on(saved.step, saved.dense_steps, paused=False)
                fresh.store.load(saved.store.state(), saved.store.kinds())
        average = _averaged(world, _noise(2, step))
        if step >= STEPS and not torch.equal(average, _averaged(other, _noise(2, step))):
            raise BrokenError(
                "what it remembers is not all in its state: keep it in the state it is given, and nowhere else"
            )


def any_shape(chosen: Configuration) -> None:
    """Raises BrokenError if a shape that it accepts does not work."""
    for shape in SMALL:
        for values in (torch.ones(shape), torch.zeros(shape), torch.full(shape, 1e4), torch.full(shape, 1e-30)):
            if not chosen.method.accepts(shape):
                continue
            slots = flat_slots([("tensor", shape)])
            gradients = [values.flatten().clone() for _ in range(2)]
            try:
                LocalWorld(replace(chosen, dense=EVERYTHING), slots, 2).average(gradients)
            except Exception as error:
                raise BrokenError(
                    f"{type(error).__name__} at shape {shape}: {error}; let accepts() say which shapes it takes"
                ) from error
            if not gradients[0].isfinite().all():
                raise BrokenError(f"the average of {values.flatten()[0]:g} at shape {shape} is not finite")


def _vectors() -> dict[str, Tensor]:
    """Matrices of kinds that methods find hard."""
    generator = torch.Generator().manual_seed(3)
    gaussian = torch.randn(SIDE, SIDE, generator=generator)
    outlier = gaussian.clone()
    outlier[0, 0] = 1e4
    sparse = torch.where(gaussian.abs() > 2, gaussian, gaussian * 1e-4)
    return {"Gaussian": gaussian, "heavy-tailed": gaussian**3, "nearly sparse": sparse, "with one outlier": outlier}


def _without(chosen: Configuration, vectors: Sequence[Tensor], workers: int = 1) -> tuple[LocalWorld, Tensor]:
    """A world without a memory, and what it is to bring back: some vectors of one shape, one after another."""
    plain = Configuration.make(
        chosen.method, {}, str(chosen.granularity), chosen.route, memory="none", dense=EVERYTHING
    )
    slots = flat_slots([(f"tensor {number}", tuple(vector.shape)) for number, vector in enumerate(vectors)])
    return LocalWorld(plain, slots, workers), torch.stack(list(vectors)).flatten()


def _brought_back(world: LocalWorld, mean: Tensor) -> Tensor:
    """What rank 0 has of gradients that differ by worker and whose mean this is."""
    workers = len(world.engines)
    gradients = [mean * (2 * (rank + 1) / (workers + 1)) for rank in range(workers)]
    world.average(gradients)
    return gradients[0]


def _relative(chosen: Configuration, vectors: Sequence[Tensor], step: int, workers: int = 1) -> Tensor:
    """Of what comes back in one step, ``|Q(x) - x|² / |x|²`` of each vector: ``float64[len(vectors)]``."""
    world, flat = _without(chosen, vectors, workers)
    for engine in world.engines:
        engine.begin(step)
    given = flat.view(len(vectors), -1).double()
    return (_brought_back(world, flat).view(len(vectors), -1) - given).square().sum(1) / given.square().sum(1)


def _apart(chosen: Configuration) -> list[dict[str, Tensor]]:
    """The vectors that may lie in one buffer: all of them, unless a segment would hold several."""
    vectors = _vectors()
    return [{name: vector} for name, vector in vectors.items()] if chosen.granularity.joins else [vectors]


def class_as_declared(chosen: Configuration) -> None:
    """Raises BrokenError unless it is unbiased, contractive or exact as it says, also of the mean of several workers.

    Unbiased against the standard error of the mean of 400 draws, pooled over the elements: the error along the vector
    itself is within 5 standard errors (chance of a false alarm below 1e-6), and the squared error of the mean within
    25 % of the variance of the mean: a bias would add 400 times its square. So does that of three workers' mean, within
    twice the variance. Where one draw decides many elements, as of singular vectors, chance alone goes beyond; so what
    does is held to the same with 4,000, of which a bias adds more.
    """
    if chosen.method.bias == "unbiased":
        _usual(chosen, "clip")
        vector = _vectors()["Gaussian"].flatten()
        for workers in SPREAD:
            world = _without(chosen, [_vectors()["Gaussian"]], workers)[0]
            if _mean_is_off(world, vector, DRAWS) and (broken := _mean_is_off(world, vector, 10 * DRAWS)):
                raise BrokenError(f"with {workers} worker{'s' * (workers > 1)} {broken}")
    elif chosen.method.bias in ("contractive", "exact"):
        told = type(chosen.method).error_bound is not Method.error_bound
        if told and (left := chosen.method.error_bound(SIDE * SIDE)) > 1:
            raise SilentError(f"with these options it leaves up to {left:g} of |x|²")
        most = 1 + 1e-6 if chosen.method.bias == "contractive" else 1e-4
        for vectors in _apart(chosen):
            for name, left in zip(vectors, _relative(chosen, [*vectors.values()], 0).tolist(), strict=True):
                if left > most:
                    raise BrokenError(f"|Q(x) - x|² is {left:.3g} |x|² for a {name} x of shape {(SIDE, SIDE)}")
            off = (
                _relative(chosen, [*vectors.values()], 0, SEVERAL) if chosen.method.bias == "exact" else torch.zeros(1)
            )
            if (left := float(off.max())) > most:
                raise BrokenError(f"the average of {SEVERAL} workers is off their mean x by {left:.3g} |x|², squared")
    elif chosen.method.bias == "biased":
        raise SilentError("nothing to hold it to")
    else:
        raise BrokenError(f"bias={chosen.method.bias!r} is not known; declare one of {', '.join(get_args(Bias))}")


def _mean_is_off(world: LocalWorld, vector: Tensor, count: int) -> str:
    """Says how far off the mean of so many draws is, if it is farther than chance explains."""
    draws = torch.stack([_brought_back(world, vector) for _ in range(count)]).double()
    error, variance = draws.mean(0) - vector, draws.var(0) / count
    along, allowed = abs(float((error * vector).sum())), 5 * float((variance * vector.square()).sum().sqrt())
    square, expected, whole = float(error.square().sum()), float(variance.sum()), float(vector.square().sum())
    if along <= allowed + 1e-6 * whole and square <= SPREAD[len(world.engines)] * expected + 1e-9:
        return ""
    return (
        f"the mean of {count:,} draws is off by {math.sqrt(square / whole):.3g} of the gradient, where chance explains "
        f"{math.sqrt(expected / whole):.3g}"
    )


def bound(chosen: Configuration) -> None:
    """Raises BrokenError unless the mean error of 16 draws, 5 standard errors of it allowed, is within its bound."""
    bound = chosen.method.error_bound(min(SIDE * SIDE, Granularity.parse(str(chosen.granularity)).most))
    if not math.isfinite(bound):
        raise SilentError("it declares none")
    for vectors in _apart(chosen):
        draws = torch.stack([_relative(chosen, [*vectors.values()], step) for step in range(16)])
        for name, errors in zip(vectors, draws.T, strict=True):
            allowed = bound * (1 + 1e-4) + 5 * float(errors.std()) / 4 + 1e-9
            if float(errors.mean()) > allowed:
                mean = float(errors.mean())
                raise BrokenError(f"E |Q(x) - x|² is {mean:.3g} |x|², above {bound:.3g}, for a {name} x")


def size(chosen: Configuration) -> None:
    """Raises BrokenError unless it writes at most what it says, but for rounding up, and at least nine tenths of it.

    That is in its first step.
    """
    declared = chosen.method.declared_bits(SIDE, SIDE, learning=True)
    if math.isnan(declared):
        raise SilentError("it declares none: wire_bits")
    if chosen.route != chosen.method.routes[0]:
        raise SilentError(f"it is declared of route={chosen.method.routes[0]!r}")
    if not chosen.method.accepts((SIDE, SIDE)):
        raise SilentError(f"it leaves a matrix of {SIDE} by {SIDE} to dense averages")
    _usual(chosen, "values", "indices", "warmup", "sync")
    which = "learning_bits" if chosen.method.learning_bits else "wire_bits"
    bits = 8 * roundtrip(_vectors()["Gaussian"], chosen.method, route=chosen.route).wire_bytes
    if not 0.9 * declared <= bits <= declared + 160:
        raise BrokenError(
            f"a matrix of {SIDE} by {SIDE} took {bits:,} bits, where {which}, {getattr(chosen.method, which)!r}, says "
            f"{declared:,.0f}"
        )
