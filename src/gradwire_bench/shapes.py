"""Gradients with the shapes of known models, delivered through the true DDP path at almost no cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.errors import ConfigurationError, did_you_mean

Shape = tuple[int, ...]
NamedShape = tuple[str, Shape]

_SHIFT = 16
"""Elements (one cache line of float32) by which a shift moves the window over the noise."""
_SHIFTS = 4096


def resnet50() -> tuple[NamedShape, ...]:
    """ResNet-50 for 1 000 classes (He et al. 2015, arXiv 1512.03385): 161 tensors, 25 557 032 parameters."""
    return tuple(_resnet50())


def tiny() -> tuple[NamedShape, ...]:
    """A few matrices, kernels and vectors, 0.1 M parameters: for tests and for a first look."""
    return (
        ("conv.weight", (32, 16, 3, 3)),
        ("conv.bias", (32,)),
        ("hidden.weight", (256, 288)),
        ("hidden.bias", (256,)),
        ("head.weight", (10, 256)),
        ("head.bias", (10,)),
    )


_BUILT_IN = {"resnet50": resnet50, "tiny": tiny}


def names() -> tuple[str, ...]:
    """The shape sets there are."""
    return tuple(_BUILT_IN)


def get(name: str) -> tuple[NamedShape, ...]:
    """Names and shapes of a model's parameters in definition order.

    Raises:
        ConfigurationError: If there is no such set.
    """
    if name not in _BUILT_IN:
        raise ConfigurationError(
            f"shapes={name!r} is not known; {did_you_mean(name, _BUILT_IN)}choose one of {', '.join(_BUILT_IN)}"
        )
    return _BUILT_IN[name]()


def numel(shapes: Sequence[NamedShape]) -> int:
    """Number of parameters."""
    return sum(math.prod(shape) for _, shape in shapes)


def _resnet50() -> Iterator[NamedShape]:
    def batch_norm(name: str, channels: int) -> Iterator[NamedShape]:
        yield f"{name}.weight", (channels,)
        yield f"{name}.bias", (channels,)

    yield "conv1.weight", (64, 3, 7, 7)
    yield from batch_norm("bn1", 64)
    inputs = 64
    for layer, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        outputs = 4 * width
        for block in range(blocks):
            prefix = f"layer{layer}.{block}"
            kernels = ((width, inputs, 1, 1), (width, width, 3, 3), (outputs, width, 1, 1))
            for index, kernel in enumerate(kernels, start=1):
                yield f"{prefix}.conv{index}.weight", kernel
                yield from batch_norm(f"{prefix}.bn{index}", kernel[0])
            if block == 0:
                yield f"{prefix}.downsample.0.weight", (outputs, inputs, 1, 1)
                yield from batch_norm(f"{prefix}.downsample.1", outputs)
            inputs = outputs
    yield "fc.weight", (1000, 2048)
    yield "fc.bias", (1000,)


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
