"""A Keras model and its optimizer: whether a method can be attached, and what must not happen to it then."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from gradwire import bridge
from gradwire.attach.elsewhere import Described
from gradwire.bridge import Saved
from gradwire.errors import ConfigurationError
from gradwire.keras.metrics import AverageMetrics

taken: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers that have a method."""


class Attached(Saved):
    """What a model or an optimizer has; :meth:`close` takes it off again.

    Attributes:
        model: The model; None if an optimizer was given.
        optimizer: The optimizer.
    """

    model: Any = None
    optimizer: Any = None

    def close(self) -> None:
        """As :meth:`gradwire.Handle.close`; model and optimizer are then as they were before."""
        if self._attached and self.optimizer in taken:
            taken.discard(self.optimizer)
            for name in ("apply", "stateless_apply"):
                vars(self.optimizer).pop(name, None)
            if self.model is not None:
                for name in ("compile", "fit", "make_train_function"):
                    vars(self.model).pop(name, None)
                self.model.train_function = None
        super().close()

    def compiled(self) -> None:
        """Called when the model was compiled again: raises ConfigurationError if the method cannot go on."""

    def fitted(self) -> None:
        """Called after ``fit``: raises ConfigurationError if the method had no part in it."""


def check(optimizer: Any, model: Any) -> None:
    """Raises ConfigurationError if anything is not as it has to be, before anything is changed."""
    if not isinstance(optimizer, keras.optimizers.Optimizer) or (model is not None and not model.built):
        given = f"target is {optimizer!r}" if model is None else "the model is not compiled and built"
        raise ConfigurationError(
            f"{given}; give a model after model.compile(optimizer=...), built by keras.Input or model.build(...), or "
            "an optimizer that is built"
        )
    if optimizer in taken:
        raise ConfigurationError("the optimizer has a method of gradwire's already; close its handle first")
    if keras.distribution.distribution() is not None:
        raise ConfigurationError(
            "keras.distribution averages by itself; leave it out, and start a process for each worker, as torchrun does"
        )
    if model is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    if not optimizer.built:
        raise ConfigurationError("the optimizer is not built; call optimizer.build(model.trainable_variables) first")
    if keras.backend.backend() == "jax":
        from gradwire.jax import check_devices

        check_devices()
    if keras.backend.backend() == "tensorflow":
        from gradwire.tensorflow import check_strategy

        check_strategy(None if model is None else model.distribute_strategy)


def guard(handle: Attached) -> None:
    """Has a model's ``compile`` not lose the method, and its ``fit`` not leave other ranks waiting."""
    model, compile_model, fit = handle.model, handle.model.compile, handle.model.fit
    deciding = keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau

    def guarded_compile(optimizer: Any = "rmsprop", *args: Any, **options: Any) -> Any:
        if optimizer is not handle.optimizer:
            raise ConfigurationError(
                "compile would give the model another optimizer, without gradwire's method; close the handle, compile, "
                "and compress again; or compile with optimizer=model.optimizer"
            )
        compile_model(optimizer, *args, **options)
        handle.compiled()

    def guarded_fit(*args: Any, **options: Any) -> Any:
        given = inspect.signature(fit).bind(*args, **options).arguments.get("callbacks") or []
        shared = handle.engine.world_size == 1
        for each in getattr(given, "callbacks", given if isinstance(given, list | tuple) else [given]):
            shared |= isinstance(each, AverageMetrics)
            if isinstance(each, deciding) and not shared:
                raise ConfigurationError(
                    f"{type(each).__name__} looks at this rank's metrics alone, and ranks would not do the same; put "
                    "gradwire.keras.AverageMetrics() before it"
                )
            if isinstance(each, keras.callbacks.TerminateOnNaN) and handle.engine.world_size > 1:
                raise ConfigurationError("TerminateOnNaN ends one rank's training and not the others'; leave it out")
        history = fit(*args, **options)
        handle.fitted()
        return history

    vars(model).update(compile=guarded_compile, fit=guarded_fit)


def described(variables: Sequence[Any]) -> list[Described]:
    """Variables by names that are the same on all ranks."""
    named = zip(bridge.names(variables), variables, strict=True)
    return [Described(name, tuple(each.shape), each.dtype) for name, each in named]


def all_variables(handle: Attached) -> list[Any]:
    """Weights and what the optimizer keeps."""
    weights = handle.optimizer._trainable_variables if handle.model is None else handle.model.weights
    return [*weights, *handle.optimizer.variables]


def send(variables: Sequence[Any], process_group: Any) -> None:
    """Gives variables the values of rank 0's."""
    values = [np.array(ops.convert_to_numpy(each.value)) for each in variables]
    bridge.broadcast(values, process_group)
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
