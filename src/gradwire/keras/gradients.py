"""Gradients of Keras models are averaged before the optimizer sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import torch
from keras import ops

from gradwire.attach.array_synchronizer import ALIGNMENT, ArraySynchronizer
from gradwire.attach.elsewhere import CPU, Cell, cells
from gradwire.engine import RECIPE, Methods
from gradwire.errors import ConfigurationError
from gradwire.keras.model import Attached, check, parts


class Handle(Attached, ArraySynchronizer):
    """A model's optimizer whose gradients are averaged; made by :func:`compress`."""

    used = False

    def begin(self) -> None:
        """Puts the average before ``apply`` and ``stateless_apply`` of this one optimizer, whose class stays so."""
        self._average, methods = _averaging(self), vars(self.optimizer)
        self._variables = list(self.optimizer._trainable_variables)
        self._names = {id(each): name for each, name in zip(self._variables, self.cells, strict=True)}
        methods["apply"] = partial(self._apply, self.optimizer.apply)
        if isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer):  # else it calls apply
            methods["stateless_apply"] = partial(self._stateless_apply, self.optimizer.stateless_apply)

    def check_ready(self) -> None:
        """Raises ConfigurationError if the model cannot be trained as it is now."""
        super().check_ready()
        _check_gradients(self.optimizer, self.model)

    def _apply(self, apply: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        order = self._variables if trainable_variables is None else list(trainable_variables)
        dynamic = getattr(self.optimizer, "dynamic_scale", None)
        scale = self.optimizer.loss_scale_factor if dynamic is None else dynamic.value
        return apply(self._averaged(grads, order, scale), trainable_variables)

    def _stateless_apply(self, apply: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        kept = zip(self.optimizer.variables, optimizer_variables, strict=True)
        scale = next(value for variable, value in kept if variable is self.optimizer.dynamic_scale)
        return apply(optimizer_variables, self._averaged(grads, self._variables, scale), trainable_variables)

    def _averaged(self, gradients: Sequence[Any], order: Sequence[Any], scale: Any) -> list[Any]:
        """Averages of some variables' gradients, whose scale is taken off and put on again."""
        self.used = True
        if unknown := [each for each in order if id(each) not in self._names]:
            raise ConfigurationError(
                f"variable {unknown[0].path!r} was not trained when the method was attached; close the handle, "
                "compile the model again, and compress it again"
            )
        names = [self._names[id(variable)] for variable in order]
        given = dict(zip(names, gradients, strict=True))
        present = {name: ops.convert_to_tensor(each) for name, each in given.items() if each is not None}
        if scale is not None:
            present = {name: each / ops.cast(scale, each.dtype) for name, each in present.items()}
        averages = self._average({**given, **present})
        made = [averages[name] for name in names]
        return made if scale is None else [each * ops.cast(scale, each.dtype) for each in made]


def compress(
    target: Any, method: Methods = RECIPE, *, broadcast: bool = True, process_group: Any = None, **options: Any
) -> Handle:
    """Averages a model's gradients over all workers, in ``fit``, ``train_on_batch`` and in loops of your own.

    To be called on every rank, after ``model.compile`` and before ``fit``. A loss scale of ``mixed_float16`` is taken
    off for the average, and put on again: a step that is not finite on one rank is left out on all. The model is saved
    as without gradwire; what the method remembers is saved by ``handle.save(folder)``.

    Args:
        target: A model that is compiled and built; or an optimizer that is built, for a loop of your own.
        method: As in :class:`gradwire.Synchronizer`, and so is what is raised.
        broadcast: Whether all ranks start from rank 0's weights and optimizer, as with DDP; they must be equal if not.
        process_group: See there.
        **options: See there.

    Example::

        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        handle = gradwire.keras.compress(model, "topk", ratio=0.01)
        model.fit(inputs, labels, callbacks=[gradwire.keras.AverageMetrics()])
    """
    model, optimizer = parts(target)
    backend = keras.backend.backend()
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        options = {"rollback": True, **options}

    def trained() -> list[Cell]:
        check(optimizer, model)
        _check_gradients(optimizer, model)
        return cells(optimizer._trainable_variables)

    alignment = ALIGNMENT if backend == "tensorflow" else 1
    device = ops.zeros(()).device if backend == "torch" else CPU
    handle = Handle(trained, method, process_group, options, alignment=alignment, device=device)
    handle.hold(target, broadcast, process_group)
    if not broadcast:
        handle.check_equal(handle.everything())
    handle.begin()
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
    if keras.backend.backend() != "jax" and model is not None and model.jit_compile:
        raise ConfigurationError(
            f"jit_compile is True, and what is compiled for {keras.backend.backend()} cannot call gradwire; give "
            "model.compile(..., jit_compile=False)"
        )


def _averaging(handle: Handle) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """What averages gradients by name, in their dtypes, by this backend; a missing one counts as zero."""
    match keras.backend.backend():
        case "tensorflow":
            from gradwire.tensorflow import averaging

            return averaging(handle)
        case "jax":
            from gradwire.jax import averaged

            return lambda given: averaged(handle, given)[0]
        case _:
            flats = [torch.zeros(numel, device=handle.engine.store.device) for numel in handle.numels]
            return partial(handle.average_tensors, flats)
