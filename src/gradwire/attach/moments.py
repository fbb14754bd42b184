"""Squares of gradients that are gone once a step's gradient is summed up: of samples, or of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gradwire.attach.shards import is_sharded
from gradwire.attach.wrappers import parameters_of, unwrapped_model
from gradwire.codecs.select.variance import SQUARES
from gradwire.engine.engine import Engine
from gradwire.errors import ConfigurationError
from gradwire.memory import Kind

CHUNK_ELEMENTS = 1 << 22
"""Gradients of samples that are held at a time, in float32 elements."""


class Averaging(Protocol):
    """What is asked of a handle: the engine behind it."""

    @property
    def engine(self) -> Engine:
        """Which keeps the squares."""


class SecondMoments:
    """Tells methods of variance how far a step's samples, or its micro-batches, agree.

    To be made once after :func:`gradwire.compress` or :class:`gradwire.Synchronizer`, on every rank. From then on every
    backward pass adds squares to what the method reads and clears when the step's gradients are averaged.

    Per micro-batch, each backward pass counts as one sample: without gradient accumulation (under ``no_sync``) that is
    ``moments="step"``. It costs one pass over every gradient: on the demo's CNN, 64 images on one core, forward and
    backward took 36.5 ms with it and 36.3 ms without.

    Per sample, squares are formed layer by layer from inputs and output gradients, which must have the batch first; the
    loss must be a mean or sum over samples. For ``nn.Linear`` with one vector a sample that is a product of squared
    inputs and squared gradients, as much work as the layer's weight gradient; for ``nn.Conv2d``, and sequences in
    ``nn.Linear``, every sample's gradient is formed. On the same CNN that took 49.8 ms, 37 % more than without: the
    paper's claim that it costs next to nothing was not confirmed. Where samples share statistics, as in batch
    normalisation, what counts is each one's share of the gradient.

    Args:
        model: The model, DDP's or plain, that the gradients are of.
        handle: What averages them, a :class:`gradwire.Handle`, with the method's ``moments`` as in ``per``.
        per: ``"samples"`` or ``"microbatches"``.

    Raises:
        ConfigurationError: If the method wants no such squares, or none can be formed of a compressed parameter:
            because of the layer it is in, or because the rank holds or averages a part of it.

    Example:
        >>> handle = gradwire.compress(model, "variance", moments="samples")
        >>> moments = gradwire.SecondMoments(model, handle, per="samples")
    """

    def __init__(self, model: nn.Module, handle: Averaging, per: Literal["samples", "microbatches"]) -> None:
        wrapped = unwrapped_model(model)
        module = wrapped.module if isinstance(wrapped, DistributedDataParallel) else model
        configuration = handle.engine.configuration
        rules = [rule for rule in configuration.rules if getattr(rule.method, "moments", None) == per]
        if per not in ("samples", "microbatches") or not rules:
            raise ConfigurationError(
                f"per={per!r} does not go with {configuration}; choose method 'variance' or 'hybrid' with "
                "moments='samples' or 'microbatches', and the same here"
            )
        self._store = handle.engine.store
        self._names = {
            id(parameter): name
            for name, parameter in parameters_of(module)
            if parameter.requires_grad
            and (rule := configuration.rule(name)) in rules
            and rule.compresses(tuple(parameter.shape))
        }
        parameters = [each for each in module.parameters() if id(each) in self._names]
        for each in parameters:
            self._check_whole(each, handle.engine)
        if per == "samples":
            layers = _layers(module)
            self._check(layers, {id(each) for each in parameters})
            for parameter in parameters:
                self._begin(parameter)
            self._hooks = [layer.register_forward_hook(self._after_forward) for layer in layers]
        else:
            for parameter in parameters:
                self._begin(parameter)
            self._hooks = [_on_gradient(parameter, self._of_gradient(parameter)) for parameter in parameters]
        handle.engine.observed = True

    def close(self) -> None:
        """Takes all hooks away; the method goes on without squares."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, parameter: Tensor) -> None:
        name = self._names[id(parameter)]
        if self._store.get(SQUARES, name) is None:
            self._store.stacked(
                SQUARES, [name], lambda _: torch.zeros(parameter.shape, dtype=torch.float32), Kind.GIVEN
            )

    def _check(self, layers: list[nn.Linear | nn.Conv2d], parameters: set[int]) -> None:
        covered = {id(each) for layer in layers for each in layer.parameters(recurse=False)}
        for missing in parameters - covered:
            raise ConfigurationError(
                f"squares of samples cannot be formed of {self._names[missing]!r}: it is not in an nn.Linear or in an "
                "nn.Conv2d padded with a number of zeros; choose 'microbatches', or keep it dense by a DensePolicy"
            )

    def _check_whole(self, parameter: Tensor, engine: Engine) -> None:
        name = self._names[id(parameter)]
        if engine.configuration.rule(name).in_parts(tuple(parameter.shape), engine.nodes):
            what, remedy = "with inside= a rank averages its own rows of a whole node's gradient", "inside="
        elif is_sharded(parameter):
            what, remedy = "it is a DTensor, and squares are of parameters that each rank has as they are", "FSDP"
        else:
            return
        raise ConfigurationError(
            f"squares cannot be formed of {name!r}: {what}; choose moments='step', or leave {remedy} out"
        )

    def _squares(self, parameter: Tensor | None) -> Tensor | None:
        name = None if parameter is None else self._names.get(id(parameter))
        return None if name is None else self._store.get(SQUARES, name)

    def _of_gradient(self, parameter: Tensor) -> Callable[[Tensor], None]:
        def add(gradient: Tensor) -> None:
            if (squares := self._squares(parameter)) is not None:
                wide = gradient.detach().float()
                squares.addcmul_(wide, wide)

        return add

    def _after_forward(self, layer: nn.Linear | nn.Conv2d, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Hooks the output, whose gradient is known before any gradient of a parameter of the layer is."""
        if output.requires_grad:
            given = inputs[0].detach()
            _on_gradient(output, lambda gradient: self._add(layer, given, gradient.detach()))

    def _add(self, layer: nn.Linear | nn.Conv2d, inputs: Tensor, gradient: Tensor) -> None:
        inputs, gradient = inputs.float(), gradient.float()
        if (squares := self._squares(layer.weight)) is not None:
            if isinstance(layer, nn.Conv2d):
                _add_convolution(layer, inputs, gradient, squares)
            elif inputs.dim() <= 2:
                squares.addmm_(
                    gradient.square().view(-1, layer.out_features).T, inputs.square().view(-1, layer.in_features)
                )
            else:
                of_samples = gradient.flatten(1, -2), inputs.flatten(1, -2)
                _add_products(of_samples[0].transpose(1, 2), of_samples[1], squares)
        if (squares := self._squares(layer.bias)) is not None:
            outputs_last = gradient.movedim(1, -1) if isinstance(layer, nn.Conv2d) else gradient
            squares.add_(outputs_last.reshape(len(gradient), -1, squares.numel()).sum(1).square().sum(0))


def _layers(module: nn.Module) -> list[nn.Linear | nn.Conv2d]:
    """The layers of which squares of single samples can be formed."""
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, nn.Linear)
        or (isinstance(layer, nn.Conv2d) and layer.padding_mode == "zeros" and not isinstance(layer.padding, str))
    ]


def _on_gradient(tensor: Tensor, add: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = tensor.register_hook(add)  # type: ignore[no-untyped-call]
    return handle


def _add_convolution(layer: nn.Conv2d, inputs: Tensor, gradient: Tensor, squares: Tensor) -> None:
    """Each sample's gradient is a product of its patches and its output gradient, group by group."""
    options: dict[str, Any] = {"dilation": layer.dilation, "padding": layer.padding, "stride": layer.stride}
    groups = layer.groups
    of_groups = inputs.chunk(groups, 1), gradient.flatten(2).chunk(groups, 1), squares.chunk(groups, 0)
    for pixels, of_outputs, target in zip(*of_groups, strict=True):
        patches = unfold(pixels, layer.kernel_size, **options)
        _add_products(of_outputs, patches.transpose(1, 2), target.view(len(target), -1))


def _add_products(left: Tensor, right: Tensor, squares: Tensor) -> None:
    """``squares += sum over z of (left[z] @ right[z])**2``, a few samples at a time."""
    count = max(1, CHUNK_ELEMENTS // squares.numel())
    for rows, columns in zip(torch.split(left, count), torch.split(right, count), strict=True):
        squares.add_(torch.bmm(rows, columns).square_().sum(0))
