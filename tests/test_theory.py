"""What each method says of itself, held against what it does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import gradwire
from catalogue import OPTIONS
from gradwire import methods
from gradwire.bench.catalogue import declared_bits

SIDE = 64
VALUES = SIDE * SIDE

CASES = [(name, options) for name in methods.names() for options in [{}, *OPTIONS.get(name, [])]]


def vectors() -> list[torch.Tensor]:
    """Gaussian, heavy-tailed, nearly sparse, and with one huge outlier."""
    generator = torch.Generator().manual_seed(3)
    gaussian = torch.randn(SIDE, SIDE, generator=generator)
    outlier = gaussian.clone()
    outlier[0, 0] = 1e4
    return [gaussian, gaussian**3, torch.where(gaussian.abs() > 2, gaussian, gaussian * 1e-4), outlier]


@pytest.mark.parametrize("name", methods.names())
def test_every_method_declares_what_it_is(name: str) -> None:
    kind = methods.get(name)
    assert kind.citation
    assert kind.wire_bits
    assert kind.bias in ("exact", "unbiased", "contractive", "biased")
    assert set(kind.granularities) == {"layer", "bucket", "model", "block"} or kind.why_granularity
    assert kind.memory in kind.memories
    assert (kind.__doc__ or "").strip()


@pytest.mark.parametrize("name", methods.names())
def test_size_on_the_wire_is_as_declared(name: str) -> None:
    """At most the formula, but for what rounding up to bytes and words adds, and not under nine tenths of it."""
    bits = 8 * gradwire.roundtrip(vectors()[0], name).wire_bytes
    formula = declared_bits(methods.get(name)(), SIDE, SIDE)
    assert 0.9 * formula <= bits <= formula + 160, (bits, formula)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_error_is_within_its_bound(name: str, options: dict[str, Any]) -> None:
    """The mean over 32 draws, with 5 standard errors of it allowed; for one draw where nothing is drawn."""
    method = methods.get(name)(**options)
    bound = method.error_bound(VALUES)
    for vector in vectors():
        errors = torch.stack([relative_error(vector, method, step) for step in range(32)])
        allowance = 5 * errors.std() / math.sqrt(len(errors))
        assert errors.mean() <= bound * (1 + 1e-4) + allowance + 1e-9, (errors.mean(), bound)


def relative_error(vector: torch.Tensor, method: methods.Method, step: int) -> torch.Tensor:
    decoded = gradwire.roundtrip(vector, method, memory="none", step=step).decoded
    return ((decoded.double() - vector.double()).square().sum() / vector.double().square().sum()).float()


@pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name, options in CASES if methods.get(name).bias == "unbiased"], ids=str
)
def test_what_is_called_unbiased_is(name: str, options: dict[str, Any]) -> None:
    """Against the standard error of the mean of 400 draws, pooled over the elements.

    The error along the vector itself is within 5 standard errors (chance of a false alarm below 1e-6). The squared
    error of the mean is within 25 % of the variance of the mean: a bias would add 400 times its square.
    """
    vector = vectors()[0]
    draws = torch.stack(
        [gradwire.roundtrip(vector, name, memory="none", step=step, **options).decoded for step in range(400)]
    ).double()
    error = draws.mean(0) - vector
    variance = draws.var(0) / 400
    assert (error * vector).sum().abs() <= 5 * (variance * vector.square()).sum().sqrt()
    assert 0.75 <= error.square().sum() / variance.sum() <= 1.25


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, options) for name, options in CASES if methods.get(name).bias == "contractive"],
    ids=str,
)
def test_what_is_called_contractive_is(name: str, options: dict[str, Any]) -> None:
    if methods.get(name)(**options).error_bound(VALUES) == math.inf:
        pytest.skip("with these values it has no bound")
    for vector in vectors():
        assert relative_error(vector, methods.get(name)(**options), 0) <= 1 + 1e-6
