"""What a method does to gradients that are given: its error, and the theory's bounds for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.errors import ConfigurationError
from gradwire.local.alone import check_tensor, roundtrip
from gradwire.methods import Method, make, parse
from gradwire.plain import plain


@dataclass(frozen=True)
class LayerAnalysis:
    """A method on one layer's gradient.

    Attributes:
        name: The parameter.
        numel: Its elements.
        worker_omega: Measured ``E |Q_W(g)|^2 / |g|^2 - 1``.
        owner_omega: The same of ``Q_M`` on what the workers' operator gave; 0 where the average is not compressed.
        error: Measured ``E |Q_W(g) - g|^2 / |g|^2``.
    """

    name: str
    numel: int
    worker_omega: float
    owner_omega: float
    error: float

    @property
    def growth(self) -> float:
        """``(1 + Omega_M)(1 + Omega_W)``."""
        return (1 + self.owner_omega) * (1 + self.worker_omega)


@dataclass(frozen=True)
class Analysis:
    """A method on a model's gradient, layer by layer and as a whole.

    The bounds are those of Dutta et al. 2020, arXiv:1911.08250: convergence is slowed by a term in proportion to
    ``sum over layers of (1 + Omega_M)(1 + Omega_W)`` with one operator a layer, and to the number of layers times the
    largest of them with one for the entire model.

    Attributes:
        layers: One entry a parameter, in order.
        layer_wise_error: Measured ``E |Q(g) - g|^2 / |g|^2`` of the whole gradient, each layer a segment of its own.
        entire_model_error: The same with the whole gradient as one segment; None where the method cannot do that.
    """

    layers: tuple[LayerAnalysis, ...]
    layer_wise_error: float
    entire_model_error: float | None

    @property
    def layer_wise_bound(self) -> float:
        """The sum over layers."""
        return sum(layer.growth for layer in self.layers)

    @property
    def entire_model_bound(self) -> float:
        """The number of layers times the largest."""
        return len(self.layers) * max(layer.growth for layer in self.layers)


def analyze(
    gradients: Mapping[str, Tensor | None],
    method: str | Method,
    *,
    owner: str | Codec | None = None,
    draws: int = 16,
    seed: int = 0,
    **options: Any,
) -> Analysis:
    """Measures what a method does to a model's gradients, without a memory.

    Args:
        gradients: float32, float16, bfloat16 or float64 gradients by parameter name; those that are None or zero
            everywhere are left out, for they have no relative error.
        method: A name of ``gradwire.methods.names()``, also with its options as text, or a method object.
        owner: As in :func:`gradwire.compress`.
        draws: Steps of randomness to average over, at least 1.
        seed: Where all randomness starts.
        **options: The method's hyper-parameters.

    Raises:
        ConfigurationError: If there is no gradient, one is of another dtype or has no values, or the method cannot be
            as asked.

    Example:
        >>> loss.backward()
        >>> gradients = {name: each.grad for name, each in net.named_parameters()}
        >>> analysis = gradwire.analyze(gradients, "topk", ratio=0.01)
        >>> analysis.layer_wise_bound <= analysis.entire_model_bound
        True
    """
    draws = plain(draws)
    if not isinstance(draws, int) or draws < 1:
        raise ConfigurationError(f"draws={draws!r} is out of range; choose a whole number, at least 1")
    named, written = parse(method) if isinstance(method, str) else (method, {})
    if twice := written.keys() & options.keys():
        raise ConfigurationError(
            f"method={method!r} came with {', '.join(f'{each}={options[each]!r}' for each in sorted(twice))}; "
            "write it with the method or give it, not both"
        )
    chosen = make(named, {**written, **options})
    _check(gradients)
    present = [(name, each) for name, each in gradients.items() if each is not None]
    given = {name: gradient.float() for name, gradient in present if gradient.count_nonzero()}
    if not given:
        raise ConfigurationError("there is no gradient that is not zero; run a backward pass first")

    def decoded(tensor: Tensor, step: int, owner: str | Codec | None = None) -> Tensor:
        return roundtrip(tensor, chosen, memory="none", owner=owner, seed=seed, step=step).decoded

    layers, lost, total = [], 0.0, 0.0
    for name, gradient in given.items():
        sent = [decoded(gradient, step) for step in range(draws)]
        again = [decoded(gradient, step, owner) for step in range(draws)] if owner is not None else sent
        energy = _square(gradient)
        missed = sum(_square(each - gradient) for each in sent) / draws
        kept = sum(map(_square, sent)) / draws
        kept_by_owner = sum(map(_square, again)) / draws
        layers.append(
            LayerAnalysis(
                name=name,
                numel=gradient.numel(),
                worker_omega=kept / energy - 1,
                owner_omega=kept_by_owner / kept - 1 if kept else 0.0,
                error=missed / energy,
            )
        )
        lost, total = lost + missed, total + energy
    entire = None
    if "model" in chosen.granularities:
        whole = torch.cat([gradient.flatten() for gradient in given.values()])
        entire = sum(_square(decoded(whole, step) - whole) for step in range(draws)) / draws / _square(whole)
    return Analysis(tuple(layers), lost / total, entire)


def _check(gradients: object) -> None:
    if not isinstance(gradients, Mapping):
        kind = type(gradients).__name__
        raise ConfigurationError(f"gradients is a {kind}; give them by name, as in {{'weight': grad}}")
    for name, each in gradients.items():
        if each is not None:
            check_tensor(f"the gradient of {name!r}", each)
            if each.is_meta:
                raise ConfigurationError(f"the gradient of {name!r} is on the meta device; give one that has values")


def _square(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())
