"""On gradients that stay, averages tend to their mean: every method, memory, route, granularity and owner."""

from __future__ import annotations

import math

import pytest
import torch

from catalogue import OPTIONS, Case, cases
from gradwire import memory as memories
from gradwire import methods
from gradwire.engine.configuration import Configuration
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld
from gradwire.memory import EF21, Diana, Memory, Momentum, Residual
from gradwire.policy import DensePolicy

WORKERS = 2
SLOTS = flat_slots([("matrix", (16, 24)), ("vector", (45,))])
NUMEL = SLOTS[-1].stop
LARGEST = max(slot.numel for slot in SLOTS)
GRADIENTS = [0.1 * torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)) for rank in range(WORKERS)]
MEAN = torch.stack(GRADIENTS).mean(0).double()
TWO_WAY = [("topk", {"ratio": 0.1}), ("efsignsgd", {}), ("qsgd", {"bits": 4}), ("natural", {})]
OWNERS = ["sign", "qsgd:4", "nearest:4", "natural"]
# A collective that adds in half precision rounds each sum, which no worker can see.
ROUNDING = {"fp16": 2.0**-10, "bf16": 2.0**-7}
# Two values that share the one column of a sketch are read as the smaller one for ever: SketchML on a dozen values.
STUCK = 2e-3


def averages(configuration: Configuration, steps: int) -> torch.Tensor:
    """What every worker gets in each of some steps with the same gradients: ``float64[steps, NUMEL]``."""
    world = LocalWorld(configuration, SLOTS, WORKERS)
    found = []
    for _ in range(steps):
        gradients = [each.clone() for each in GRADIENTS]
        world.average(gradients)
        found.append(gradients[0])
    return torch.stack(found).double()


def relative(error: torch.Tensor) -> torch.Tensor:
    """Norms along the last dimension, relative to the mean's."""
    return torch.linalg.vector_norm(error, dim=-1) / torch.linalg.vector_norm(MEAN)


def made(case: Case, owner: str | None = None, memory: Memory | None = None) -> Configuration:
    return Configuration.make(
        case.method,
        case.options,
        case.granularity,
        case.route,
        memory or case.memory,
        owner,
        DensePolicy(below=0, vectors=False),
    )


def promised(configuration: Configuration) -> bool:
    """Whether theory says that averages tend to the mean."""
    method, parts = configuration.method, configuration.memory.within
    if method.why_no_mean or any(part.why_no_mean for part in parts):
        return False
    feeds_back = not all(isinstance(part, memories.NoMemory | Momentum) for part in parts)
    return feeds_back or method.bias in ("exact", "unbiased")


def check(configuration: Configuration) -> None:
    """By what kind of memory it is.

    Estimates (EF21, DIANA): the average itself. The square of EF21's error shrinks by ``1 - delta`` every step, that of
    DIANA's by ``1 - 1 / (1 + Omega)`` from Omega times the gradient's: so many steps that it is a hundredth, and more
    because an owner follows those who follow. For signs ``delta`` is as good as nothing, for a worst case that does not
    last; so there, too, the error falls by a fifth from a third of the steps to the end.

    Error feedback: what is remembered stays bounded, so the running mean is off by a constant over the number of steps:
    its largest in the last third of them is at most 1.35 times that in the second, where one that grew as the number of
    steps would be 1.5 times as large and one that grew by 2 % a step as large as allowed. A low-pass filter passes on a
    fifth a step, and takes so long to settle that it has more than six times as many steps, and that 1.4.

    Neither: the operator is unbiased, and the running mean's squared error is its variance over the number of steps, to
    within a factor of 2, which is more than 5 standard errors for some 400 coordinates.
    """
    method, parts = configuration.method, configuration.memory.within
    rounding = ROUNDING.get(methods.name_of(method), 1e-5)
    bound = method.error_bound(LARGEST)
    start = 90 if isinstance(parts[0], Momentum) else 0  # until 0.9 ** start is nothing
    if parts[-1].parts:
        first, factor = (bound, bound / (1 + bound)) if isinstance(parts[-1], Diana) else (1, min(bound, 0.9))
        steps = start + 24 + math.ceil(math.log(1e2 * max(first, 1)) / -math.log(max(factor, 1e-3)))
        errors = relative(averages(configuration, steps) - MEAN)
        assert errors[-1] <= max(0.1, rounding), float(errors[-1])
        assert errors[-1] <= max(0.8 * errors[start + (steps - start) // 3], rounding, STUCK), errors[:: steps // 6]
    elif isinstance(parts[-1], memories.NoMemory | Momentum):
        found = averages(configuration, start + 64)[start:]
        error, variance = (found.mean(0) - MEAN).square().sum(), found.var(0).sum() / len(found)
        assert error <= 2 * variance + (rounding * MEAN.norm()) ** 2 + (2 * 0.9**start * MEAN.norm()) ** 2 * (start > 0)
    else:
        steps, growth = (300, 1.4) if isinstance(parts[-1], memories.LowPass) else (45, 1.35)
        found = averages(configuration, start + steps)[start:]
        owed = relative((found - MEAN).cumsum(0))
        early, late = owed[steps // 3 : steps * 2 // 3].max(), owed[steps * 2 // 3 :].max()
        assert late <= growth * early + steps * rounding, (float(early), float(late))
        assert owed[-1] <= 0.5 * len(owed), float(owed[-1])


FIRST = [case for case in cases() if case.options == OPTIONS.get(case.method, [{}])[0]]


@pytest.mark.parametrize("name", methods.names())
def test_averages_tend_to_the_mean(name: str) -> None:
    for case in FIRST:
        if case.method == name and promised(configuration := made(case)):
            check(configuration)


@pytest.mark.parametrize(("method", "options"), TWO_WAY, ids=lambda value: str(value))
def test_averages_tend_to_the_mean_whatever_the_owner_makes_of_them(method: str, options: dict[str, float]) -> None:
    """Error feedback, EF21 as EF21-BC, DIANA both ways, for which the owner's operator is unbiased, too."""
    kind = methods.get(method)
    for owner in OWNERS:
        unbiased = kind.bias == "unbiased" and owner in ("qsgd:4", "natural")
        for carried in (Residual(), EF21(), *([Diana()] if unbiased else [])):
            for route in kind.routes:
                check(made(Case(method, options, "layer", route), owner, carried))


@pytest.mark.parametrize("values", ["fp16", "sign", "qsgd:4", "nearest:2", "quantile:16", "dynamic", "onebit", "3lc"])
def test_averages_tend_to_the_mean_however_chosen_values_are_written(values: str) -> None:
    for method, options in (("topk", {"ratio": 0.1}), ("threshold", {"threshold": 0.1})):
        for carried in methods.get(method).memories:
            if carried in ("residual", "ef21"):
                check(made(Case(method, {**options, "values": values}, "layer", "gather", carried)))


@pytest.mark.parametrize("within", [Residual(), EF21(), memories.LowPass(), Diana()], ids=str)
def test_averages_of_momenta_tend_to_the_mean(within: Memory) -> None:
    """On every route, and with Nesterov's."""
    for method in ("topk", "efsignsgd", "natural", "randomk", "globalqsgd", "scalecom"):
        kind = methods.get(method)
        allowed = {type(memories.parse(name)) for name in kind.memories}
        if type(within) not in allowed or (within.unbiased and kind.bias != "unbiased"):
            continue
        for route in kind.routes:
            for nesterov in (False, True):
                case = Case(method, OPTIONS.get(method, [{}])[0], "layer", route)
                check(made(case, memory=Momentum(nesterov=nesterov, memory=within)))


def test_what_has_no_mean_says_why() -> None:
    without = {name for name in methods.names() if methods.get(name).why_no_mean}
    assert without == {"signsgd", "signum", "lion", "lioncub", "demo", "dion"}
    assert {name for name in memories.names() if memories.parse(name).why_no_mean} == {"dgc"}
