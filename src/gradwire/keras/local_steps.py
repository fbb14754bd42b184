"""Weights of Keras models are averaged after some local steps."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from gradwire.attach.elsewhere import Array, Described, bytes_of
from gradwire.errors import ConfigurationError
from gradwire.keras.model import Attached, all_variables, check, described, guard, send, taken
from gradwire.local_sgd.mirror import Cell, Mirror, Mirrored, mirrored


class Periodic(Attached, Mirrored):
    """Local steps of a model, averaged from time to time, as :class:`gradwire.Periodic`; made by :func:`periodic`.

    Between averages ranks differ, so its state has this rank's weights, and what its optimizer keeps, too.
    """

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`gradwire.Periodic.state_dict`, and the variables."""
        return {**super().state_dict(), "variables": [bytes_of(_value(each).copy()) for each in all_variables(self)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`gradwire.Periodic.load_state_dict`; then the variables are as they were."""
        now = [(each, _value(each)) for each in all_variables(self)]
        saved = state.get("variables", [])
        if [len(each) for each in saved] != [value.nbytes for _, value in now]:
            raise ConfigurationError("the state is of a model or an optimizer with other variables; compile the same")
        super().load_state_dict(state)
        for (variable, value), own in zip(now, saved, strict=True):
            variable.assign(own.numpy().copy().view(value.dtype).reshape(value.shape))


def periodic(
    target: Any, *, buffers: bool = False, broadcast: bool = True, process_group: Any = None, **options: Any
) -> Periodic:
    """Lets every worker take local steps, and averages weights from time to time: local SGD, PQASGD, DiLoCo.

    To be called as :func:`compress` is. ``fit`` and ``train_on_batch`` are then followed by averages where one is due,
    and at the end :meth:`Periodic.synchronize` gives all ranks the same weights. Copies are made on the CPU, whose
    group, such as gloo, connects the workers.

    Args:
        target: A model that is compiled and built; or an optimizer that is built, whose steps ``handle.step()`` counts.
        buffers: Whether to average the model's other real numbers, such as statistics of batch normalisation.
        broadcast: Whether all ranks start from rank 0's weights and optimizer; weights must be equal if not.
        process_group: As in :func:`gradwire.periodic`, and so are the options.
        **options: ``every``, ``method``, ``outer`` and all others; ``moments="reset"`` is refused.

    Raises:
        ConfigurationError: If anything cannot be as asked, or differs between ranks; nothing is changed.

    Example::

        handle = gradwire.keras.periodic(model, every=8, method="qsgd", bits=4)
        model.fit(inputs, labels)
        handle.synchronize()
    """
    model = target if isinstance(target, keras.Model) else None
    optimizer: Any = getattr(target, "optimizer", None) if model is not None else target

    def mirror() -> Mirror:
        check(optimizer, model)
        if getattr(optimizer, "inner_optimizer", optimizer).use_ema and options.get("moments") != "average":
            raise ConfigurationError(
                "use_ema at last replaces weights by moving averages, which each rank has of its own; choose "
                "moments='average', which averages them, too"
            )
        moments = _moments(optimizer)
        others = (
            [] if model is None or not buffers else [v for v in model.non_trainable_variables if "float" in v.dtype]
        )
        return Mirror(_cells(optimizer._trainable_variables), lambda place: moments[place], _cells(others))

    handle = mirrored(Periodic, mirror, {**options, "broadcast": broadcast, "process_group": process_group})
    handle.model, handle.optimizer = model, optimizer
    if broadcast:
        send(all_variables(handle), process_group)
    taken.add(optimizer)
    if model is not None:
        guard(handle)
        vars(model)["make_train_function"] = _followed(handle, model.make_train_function)
    return handle


def _followed(handle: Periodic, make: Any) -> Any:
    """A model's ``make_train_function`` that makes one which averages after its step, where that is due."""
    model, on_jax, known = handle.model, keras.backend.backend() == "jax", list[Any]()

    def make_train_function(force: bool = False) -> None:
        if model.steps_per_execution != 1:
            raise ConfigurationError(
                f"steps_per_execution={model.steps_per_execution}, and weights are averaged between two executions; "
                "compile with steps_per_execution=1"
            )
        make(force)
        function = model.train_function
        if function in known:
            return

        def step(*arguments: Any) -> Any:
            if not (on_jax and handle.due):
                made = function(*arguments)
                Mirrored.step(handle)
                return made
            logs, (*groups, metrics) = function(*arguments)  # here Keras keeps what it trains out of its variables
            ours = [model.trainable_variables, model.non_trainable_variables, model.optimizer.variables]
            for variable, value in zip(itertools.chain(*ours), itertools.chain(*groups), strict=True):
                variable.assign(value)
            Mirrored.step(handle)
            return logs, (*([each.value for each in group] for group in ours), metrics)

        model.train_function, known[:] = step, [step]

    return make_train_function


def _value(variable: Any) -> Array:
    return np.asarray(ops.convert_to_numpy(variable.value))


def _cells(variables: Sequence[Any]) -> list[Cell]:
    def cell(described: Described, variable: Any) -> Cell:
        return Cell(described, lambda: _value(variable), variable.assign)

    return [cell(*each) for each in zip(described(variables), variables, strict=True)]


def _moments(optimizer: Any) -> list[dict[str, Cell]]:
    """What an optimizer keeps of each variable, which Keras tells by its name only."""
    variables = optimizer._trainable_variables
    found: list[dict[str, Cell]] = [{} for _ in variables]
    paths = sorted(((each.path.replace("/", "_") + "_", place) for place, each in enumerate(variables)), reverse=True)
    for each, cell in zip(optimizer.variables, _cells(optimizer.variables), strict=True):
        for path, place in paths:  # the longest first
            key = each.name.removeprefix(path)
            if key != each.name and each.shape == variables[place].shape and key not in found[place]:
                found[place][key] = cell
                break
    return found
