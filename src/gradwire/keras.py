"""Keras 3 on TensorFlow, JAX or torch: gradients are averaged, compressed, before the optimizer sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gradwire import bridge
from gradwire.attach.given import default_group
from gradwire.bridge import CPU, Bridge, Described
from gradwire.engine import Methods
from gradwire.engine.agreement import check_same
from gradwire.errors import ConfigurationError
from gradwire.wire import ProcessGroupTransport

try:
    import keras
    from keras import ops
except ImportError as error:
    raise ImportError(f"{error}; Keras comes with pip install 'gradwire[keras]', and its backend by itself") from error

Average = Callable[[list[Any]], list[Any]]
"""Averages gradients of all variables, in their order and dtypes; None for None."""


class Handle(Bridge):
    """A model's optimizer whose gradients are averaged; :meth:`close` takes the method off again.

    Attributes:
        model: The model; None if an optimizer was given.
        optimizer: The optimizer that gets the averages.
    """

    def __init__(self, target: Any, method: Methods, process_group: Any, options: Mapping[str, Any]) -> None:
        self.model = target if isinstance(target, keras.Model) else None
        self.optimizer: Any = getattr(target, "optimizer", None) if self.model is not None else target
        scaled = isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)
        on_torch, on_tensorflow = (keras.backend.backend() == each for each in ("torch", "tensorflow"))

        def arrays() -> list[Described]:
            _check(self.optimizer, self.model)
            variables = self.optimizer._trainable_variables
            named = zip(bridge.names(variables), variables, strict=True)
            return [Described(name, tuple(v.shape), v.dtype) for name, v in named]

        super().__init__(
            arrays,
            method,
            process_group,
            {"rollback": True, **options} if scaled else options,
            alignment=bridge.LINE // 4 if on_tensorflow else 1,
            device=ops.zeros(()).device if on_torch else CPU,
        )
        _attach(self, scaled)

    def close(self) -> None:
        """As :meth:`gradwire.Handle.close`; the optimizer is then as it was before."""
        for patched in (self.optimizer, self.model):
            for name in ("apply", "stateless_apply", "compile"):
                vars(patched).pop(name, None) if patched is not None and self._attached else None
        super().close()


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
    weights = handle.optimizer._trainable_variables if handle.model is None else handle.model.weights
    variables = [*weights, *handle.optimizer.variables]
    values = [np.array(ops.convert_to_numpy(v.value)) for v in variables]
    if not broadcast:
        handle.check_equal((v.path, value) for v, value in zip(variables, values, strict=True))
        return handle
    bridge.broadcast(values, process_group)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return handle


class AverageMetrics(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages an epoch's metrics over all workers, so that callbacks which look at them decide alike.

    To be the first callback, on every rank. It also compares what all ranks are about to do: one that trains fewer
    steps than others would have them wait for it.

    Args:
        process_group: As in :class:`gradwire.Synchronizer`.
    """

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        self._transport = ProcessGroupTransport(default_group(process_group))

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Raises ConfigurationError on all ranks if they are about to train another number of epochs or steps."""
        told = [f"{key}={self.params.get(key)}" for key in ("epochs", "steps")]
        check_same(told, self._transport, CPU, "give every rank as many batches, such as by dropping the last samples")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts averages into the logs.

        Raises:
            ConfigurationError: On all ranks, if they have other metrics.
        """
        names = sorted(logs or {})
        check_same(
            names, self._transport, CPU, "give every rank the same metrics, and validate on all ranks or on none"
        )
        values = torch.tensor([float((logs or {})[name]) for name in names], dtype=torch.float64)
        self._transport.all_reduce(values, torch.distributed.ReduceOp.SUM)()
        (logs or {}).update(zip(names, (values / self._transport.world_size).tolist(), strict=True))


def _check(optimizer: Any, model: Any) -> None:
    """Raises ConfigurationError if anything is not as it has to be, before anything is changed."""
    if not isinstance(optimizer, keras.optimizers.Optimizer) or (model is not None and not model.built):
        given = f"target is {optimizer!r}" if model is None else "the model is not compiled and built"
        raise ConfigurationError(
            f"{given}; give a model after model.compile(optimizer=...), built by keras.Input or model.build(...), or "
            "an optimizer that is built"
        )
    if "apply" in vars(optimizer):
        raise ConfigurationError("the optimizer has a method of gradwire's already; close its handle first")
    if getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps:
        raise ConfigurationError(
            "gradient_accumulation_steps is set, with which Keras hands every small step's gradients over to be "
            "averaged; leave it out, and give fit a larger batch_size"
        )
    if keras.distribution.distribution() is not None:
        raise ConfigurationError(
            "keras.distribution averages by itself; leave it out, and start a process for each worker, as torchrun does"
        )
    if model is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    if not optimizer.built:
        raise ConfigurationError("the optimizer is not built; call optimizer.build(model.trainable_variables) first")
    if any(getattr(each, "overwrite_with_gradient", False) for each in optimizer._trainable_variables):
        raise ConfigurationError("variables are overwritten by their gradients (float8), which have no average")
    if keras.backend.backend() == "jax":
        from gradwire.jax import check_devices

        check_devices()
    if keras.backend.backend() == "tensorflow":
        from gradwire.tensorflow import check_strategy

        check_strategy(None if model is None else model.distribute_strategy)
        if model is not None and model.jit_compile:
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

    vars(optimizer)["apply"] = new_apply
    if scaled:  # else it calls apply
        vars(optimizer)["stateless_apply"] = new_stateless_apply
    if model is not None:
        vars(model)["compile"] = _keeping(handle, model.compile)


def _keeping(handle: Handle, compile_model: Any) -> Any:
    """A model's ``compile`` that does not lose the method."""

    def compile_again(optimizer: Any = "rmsprop", *args: Any, **options: Any) -> Any:
        if optimizer is not handle.optimizer:
            raise ConfigurationError(
                "compile would give the model another optimizer, without gradwire's method; close the handle, compile, "
                "and compress again; or compile with optimizer=model.optimizer"
            )
        return compile_model(optimizer, *args, **options)

    return compile_again


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
