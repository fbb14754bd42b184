"""Gradients of Keras models are averaged before the optimizer sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import torch
from keras import ops

from gradwire import bridge
from gradwire.attach.elsewhere import CPU, Described
from gradwire.bridge import Bridge
from gradwire.engine import Methods
from gradwire.errors import ConfigurationError
from gradwire.keras.model import Attached, all_variables, check, described, guard, send, taken

Average = Callable[[list[Any]], list[Any]]
"""Averages gradients of all variables, in their order and dtypes; None for None."""


class Handle(Attached, Bridge):
    """A model's optimizer whose gradients are averaged; made by :func:`compress`."""

    applied = False

    def __init__(self, target: Any, method: Methods, process_group: Any, options: Mapping[str, Any]) -> None:
        self.model = target if isinstance(target, keras.Model) else None
        self.optimizer: Any = getattr(target, "optimizer", None) if self.model is not None else target
        scaled = isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)
        on_torch, on_tensorflow = (keras.backend.backend() == each for each in ("torch", "tensorflow"))

        def arrays() -> list[Described]:
            check(self.optimizer, self.model)
            _check_gradients(self.optimizer, self.model)
            return described(self.optimizer._trainable_variables)

        super().__init__(
            arrays,
            method,
            process_group,
            {"rollback": True, **options} if scaled else options,
            alignment=bridge.LINE // 4 if on_tensorflow else 1,
            device=ops.zeros(()).device if on_torch else CPU,
        )
        _attach(self, scaled)

    def compiled(self) -> None:
        """XLA may be on now."""
        _check_gradients(self.optimizer, self.model)

    def fitted(self) -> None:
        """A model's own ``train_step`` may use another optimizer."""
        if not self.applied:
            raise ConfigurationError(
                "fit did not use model.optimizer, so nothing was averaged; give compress each optimizer that is used"
            )


def compress(
    target: Any, method: Methods, *, broadcast: bool = True, process_group: Any = None, **options: Any
) -> Handle:
    """Averages a model's gradients over all workers, in ``fit``, ``train_on_batch`` and in loops of your own.

    To be called on every rank, after ``model.compile`` and before ``fit``. A loss scale of ``mixed_float16`` is taken
    off for the average, and put on again: a step that is not finite on one rank is left out on all. The model is saved
    as without gradwire; what the method remembers is saved by ``handle.save(folder)``.

    Args:
        target: A model that is compiled and built; or an optimizer that is built, for a loop of your own.
        method: As in :func:`gradwire.compress`.
        broadcast: Whether all ranks start from rank 0's weights and optimizer, as with DDP; they must be equal if not.
        process_group: As in :class:`gradwire.Synchronizer`, and so are the options.
        **options: The other choices and the method's hyper-parameters.

    Raises:
        ConfigurationError: If anything cannot be as asked, or differs between ranks; nothing is changed.

    Example::

        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        handle = gradwire.keras.compress(model, "topk", ratio=0.01)
        model.fit(inputs, labels, callbacks=[gradwire.keras.AverageMetrics()])
    """
    handle = Handle(target, method, process_group, options)
    variables = all_variables(handle)
    if not broadcast:
        handle.check_equal((v.path, np.array(ops.convert_to_numpy(v.value))) for v in variables)
        return handle
    send(variables, process_group)
    return handle


def _check_gradients(optimizer: Any, model: Any) -> None:
    """Raises ConfigurationError if gradients cannot be averaged as Keras hands them over."""
    if getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps:
        raise ConfigurationError(
            "gradient_accumulation_steps is set, with which Keras hands every small step's gradients over to be "
            "averaged; leave it out, and give fit a larger batch_size"
        )
    if any(getattr(each, "overwrite_with_gradient", False) for each in optimizer._trainable_variables):
        raise ConfigurationError("variables are overwritten by their gradients (float8), which have no average")
    if keras.backend.backend() == "tensorflow" and model is not None and model.jit_compile:
        raise ConfigurationError(
            "jit_compile is True, and XLA cannot call gradwire from within TensorFlow; give "
            "model.compile(..., jit_compile=False)"
        )


def _attach(handle: Handle, scaled: bool) -> None:
    """Puts the average before ``apply`` and ``stateless_apply`` of this one optimizer; its class stays as it is."""
    optimizer, model = handle.optimizer, handle.model
    variables = list(optimizer._trainable_variables)
    places = {id(each): place for place, each in enumerate(variables)}
    average = _BACKENDS[keras.backend.backend()](handle)
    apply, stateless_apply = optimizer.apply, optimizer.stateless_apply

    def averaged(gradients: Sequence[Any], order: Sequence[Any], scale: Any) -> list[Any]:
        handle.applied = True
        own: list[Any] = [None] * len(variables)
        for gradient, variable in zip(gradients, order, strict=True):
            if id(variable) not in places:
                raise ConfigurationError(
                    f"variable {variable.path!r} was not trained when the method was attached; close the handle, "
                    "compile the model again, and compress it again"
                )
            own[places[id(variable)]] = gradient
        if scale is not None:
            own = [None if each is None else ops.convert_to_tensor(each) / ops.cast(scale, each.dtype) for each in own]
        got = average(own)
        if scale is not None:
            got = [None if each is None else each * ops.cast(scale, each.dtype) for each in got]
        return [got[places[id(variable)]] for variable in order]

    def new_apply(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        order = variables if trainable_variables is None else list(trainable_variables)
        scale = optimizer.dynamic_scale.value if scaled else None
        return apply(averaged(list(grads), order, scale), trainable_variables)

    def new_stateless_apply(optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any) -> Any:
        place = next(place for place, each in enumerate(optimizer.variables) if each is optimizer.dynamic_scale)
        grads = averaged(list(grads), variables, optimizer_variables[place])
        return stateless_apply(optimizer_variables, grads, trainable_variables)

    taken.add(optimizer)
    vars(optimizer)["apply"] = new_apply
    if scaled:  # else it calls apply
        vars(optimizer)["stateless_apply"] = new_stateless_apply
    if model is not None:
        guard(handle)


def _on_tensorflow(handle: Handle) -> Average:
    from gradwire.tensorflow import Averaged

    return Averaged(handle)


def _on_jax(handle: Handle) -> Average:
    from gradwire.jax import averaged

    def average(gradients: list[Any]) -> list[Any]:
        given = [
            ops.zeros(array.shape, array.dtype) if each is None else each
            for array, each in zip(handle.arrays, gradients, strict=True)
        ]
        got, _ = averaged(handle, given)
        return [None if each is None else back for each, back in zip(gradients, got, strict=True)]

    return average


def _on_torch(handle: Handle) -> Average:
    flats = [torch.zeros(unit.numel, device=handle.engine.store.device) for unit in handle.units]

    def average(gradients: list[Any]) -> list[Any]:
        given = {array.name: each for array, each in zip(handle.arrays, gradients, strict=True) if each is not None}

        def fill(index: int) -> None:
            for slot in handle.units[index].slots:
                view = flats[index][slot.offset : slot.stop]
                view.copy_(given[slot.name].detach().reshape(-1)) if slot.name in given else view.zero_()

        def hand_on(index: int) -> None:
            for slot in handle.units[index].slots:
                if slot.name in given:
                    gradient = given[slot.name].detach()
                    gradient.copy_(flats[index][slot.offset : slot.stop].view(gradient.shape))

        handle.average_buckets(flats, fill, hand_on)
        return gradients

    return average


_BACKENDS: dict[str, Callable[[Handle], Average]] = {"tensorflow": _on_tensorflow, "jax": _on_jax, "torch": _on_torch}
