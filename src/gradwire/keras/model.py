"""A Keras model and its optimizer: whether a method can be attached, and what must not happen to it then."""

from __future__ import annotations

import inspect
import weakref
from functools import partial
from typing import Any

import keras

from gradwire.attach import elsewhere
from gradwire.attach.elsewhere import Cell
from gradwire.attach.foreign import Foreign
from gradwire.errors import ConfigurationError
from gradwire.keras.callbacks import AverageMetrics, Together

_taken: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers that have a method."""


class Attached(Foreign):
    """What a model or an optimizer has; :meth:`close` takes it off again.

    Attributes:
        model: The model; None if an optimizer was given.
        optimizer: The optimizer.
        used: Whether the optimizer's steps have come here.
    """

    model: Any = None
    optimizer: Any = None
    used = True

    def hold(self, target: Any, broadcast: bool, process_group: Any) -> None:
        """Gives all ranks the same weights and optimizer, of the same kinds, and has neither lose its method."""
        self.model, self.optimizer = parts(target)
        elsewhere.check_alike(self.everything(), process_group, type(self.optimizer).__name__)
        if broadcast:
            elsewhere.broadcast(self.everything(), process_group)
        _taken.add(self.optimizer)
        if self.model is not None:
            fit, again = partial(self._fit, self.model.fit, Together(self)), partial(self._compile, self.model.compile)
            vars(self.model).update(fit=fit, compile=again, train_function=None)  # one traced before averages nothing

    def close(self) -> None:
        """As :meth:`gradwire.Handle.close`; model and optimizer are then as they were before."""
        if self.attached and self.optimizer in _taken:
            _taken.discard(self.optimizer)
            for owner in (self.optimizer, self.model):
                for name in ("apply", "stateless_apply", "compile", "fit", "make_train_function"):
                    getattr(owner, "__dict__", {}).pop(name, None)
            if self.model is not None:
                self.model.train_function = None
        super().close()

    def everything(self) -> list[Cell]:
        """Weights and what the optimizer keeps."""
        getattr(self.model, "jax_state_sync", list)()  # within fit Keras keeps JAX' arrays elsewhere
        weights = self.optimizer._trainable_variables if self.model is None else self.model.weights
        return elsewhere.cells([*weights, *self.optimizer.variables])

    def check_ready(self) -> None:
        """Raises ConfigurationError if the model cannot be trained as it is now."""
        check_surroundings(self.model)
        if self.model is not None and self.model.optimizer is not self.optimizer:
            raise elsewhere.another_optimizer(f"model.optimizer is now another, {type(self.model.optimizer).__name__}")

    def _compile(self, compile_model: Any, optimizer: Any = "rmsprop", *args: Any, **options: Any) -> None:
        """The model's ``compile``, which must not lose the method."""
        if optimizer is not self.optimizer:
            raise elsewhere.another_optimizer("compile would give the model another optimizer")
        compile_model(optimizer, *args, **options)
        self.check_ready()

    def _fit(self, fit: Any, together: Together, *args: Any, **options: Any) -> Any:
        """The model's ``fit``, which must not leave other ranks waiting."""
        signature, keras_own = inspect.signature(fit), inspect.signature(partial(keras.Model.fit, self.model))
        bound = (signature if "callbacks" in signature.parameters else keras_own).bind(*args, **options)
        given = bound.arguments.get("callbacks") or []
        callbacks = given.callbacks if isinstance(given, keras.callbacks.CallbackList) else keras.tree.flatten(given)
        alone = shared = self.engine.world_size == 1
        with self.roll_call("fit") as roll_call:
            self.check_ready()
            for each in callbacks:
                shared |= isinstance(each, AverageMetrics)
                if isinstance(each, keras.callbacks.EarlyStopping | keras.callbacks.ReduceLROnPlateau) and not shared:
                    raise ConfigurationError(
                        f"{type(each).__name__} looks at this rank's metrics alone, and ranks would not do the same; "
                        "put gradwire.keras.AverageMetrics() before it"
                    )
                if isinstance(each, keras.callbacks.TerminateOnNaN) and not alone:
                    raise ConfigurationError("TerminateOnNaN ends one rank's training and not the others'; drop it")
            roll_call.ready()
        self.check_same([f"AverageMetrics among callbacks: {shared}"], "give it to fit on all ranks or on none")
        self.check_same(elsewhere.kinds(elsewhere.cells(self.model.weights)), "freeze or unfreeze layers on all ranks")
        bound.arguments["callbacks"] = [together, *(each for each in callbacks if each is not together)]
        history = fit(*bound.args, **bound.kwargs)
        if together.steps and not self.used:
            raise ConfigurationError(
                "fit did not use model.optimizer, so nothing was averaged; give compress each optimizer that is used"
            )
        return history


def parts(target: Any) -> tuple[Any, Any]:
    """A model and its optimizer; no model if ``target`` is none."""
    return (target, getattr(target, "optimizer", None)) if isinstance(target, keras.Model) else (None, target)


def check(optimizer: Any, model: Any) -> None:
    """Raises ConfigurationError if anything is not as it has to be, before anything is changed."""
    if not isinstance(optimizer, keras.optimizers.Optimizer) or (model is not None and not model.built):
        given = f"target is {optimizer!r}" if model is None else "the model is not compiled and built"
        raise ConfigurationError(
            f"{given}; give a model after model.compile(optimizer=...), built by keras.Input or model.build(...), or "
            "an optimizer that is built"
        )
    if optimizer in _taken:
        raise ConfigurationError("the optimizer has a method of gradwire's already; close its handle first")
    check_surroundings(model)
    if model is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    if not optimizer.built:
        raise ConfigurationError("the optimizer is not built; call optimizer.build(model.trainable_variables) first")


def check_surroundings(model: Any) -> None:
    """Raises ConfigurationError if the framework averages, too, or a process has several devices."""
    if keras.distribution.distribution() is not None:
        raise elsewhere.averages_itself("keras.distribution")
    if keras.backend.backend() == "jax":
        from gradwire.jax import check_devices

        check_devices()
    if keras.backend.backend() == "tensorflow":
        from gradwire.tensorflow import check_surroundings

        check_surroundings(None if model is None else model.distribute_strategy)
