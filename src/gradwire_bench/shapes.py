"""Gradients with the shapes of known models, delivered through the true DDP path at almost no cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.cost import shapes as models
from gradwire.cost.shapes import NamedShape, Shape, numel

__all__ = ["NamedShape", "Noise", "Shape", "ShapedModel", "get", "numel"]

_SHIFT = 16
"""Elements (one cache line of float32) by which a shift moves the window over the noise."""
_SHIFTS = 4096


def get(name: str) -> tuple[NamedShape, ...]:
    """Names and shapes of a model's parameters in definition order.

    Raises:
        ConfigurationError: If there is no such set.
    """
    return models.get(name).parameters


class Noise:
    """Gaussian gradients for many steps from one buffer: every step looks at it through another window.

    Drawing 25 M normal values takes longer than compressing them; a shifted window is new data for each parameter at no
    cost, and no step can gain from a gradient that it has seen before.
    """

    def __init__(self, numel: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.values = torch.randn(numel + _SHIFT * _SHIFTS, generator=generator)

    def window(self, step: int, start: int, shape: Shape) -> Tensor:
        """The gradient of the parameter that begins at element ``start`` in step ``step``; shares memory."""
        shift = _SHIFT * (step * 1_009 % _SHIFTS)
        return self.values[start + shift : start + shift + math.prod(shape)].view(shape)


class ShapedModel(nn.Module):
    """A model without computation: backward hands each parameter a prepared gradient, the last layer's first.

    DDP copies the gradient into its bucket, as it does for every model; nothing else is spent. The parameters lie in
    memory that the caller gives, so that many models can be alive at once.

    Args:
        shapes: Names and shapes in definition order.
        storage: ``float32[numel]`` for the parameters' values, which are never read.
        noise: Where the gradients come from, at least as long as ``storage``.
    """

    def __init__(self, shapes: Sequence[NamedShape], storage: Tensor, noise: Noise) -> None:
        super().__init__()
        self._noise = noise
        self._starts: list[int] = []
        start = 0
        for name, shape in shapes:
            stop = start + math.prod(shape)
            self.register_parameter(name.replace(".", "_"), nn.Parameter(storage[start:stop].view(shape)))
            self._starts.append(start)
            start = stop

    def forward(self, step: int) -> Tensor:
        """A scalar whose backward delivers the gradients of step number ``step``."""
        carrier = torch.zeros(())
        for start, parameter in zip(self._starts, self.parameters(), strict=True):
            carrier = _Deliver.apply(carrier, parameter, self._noise, step, start)  # type: ignore[no-untyped-call]
        return carrier


class _Deliver(torch.autograd.Function):
    """Passes the carrier on; in backward gives the parameter a view of the noise, which autograd takes uncopied."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, parameter: Tensor, noise: Noise, step: int, start: int) -> Tensor:
        ctx.prepared = (noise, step, start, tuple(parameter.shape))
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        noise, step, start, shape = ctx.prepared
        return gradients[0], noise.window(step, start, shape), None, None, None
