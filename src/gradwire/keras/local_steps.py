"""Weights of Keras models are averaged after some local steps."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import keras

from gradwire.attach.elsewhere import Cell, cells
from gradwire.errors import ConfigurationError
from gradwire.keras.model import Attached, check, parts
from gradwire.local_sgd.mirror import Mirror, Mirrored, mirrored


class Periodic(Attached, Mirrored):
    """Local steps of a model, averaged from time to time, as :class:`gradwire.Periodic`; made by :func:`periodic`."""

    _followed: Any = None

    def _make_train_function(self, make: Any, force: bool = False) -> None:
        """The model's ``make_train_function``, whose function is followed by averages."""
        if (steps := self.model.steps_per_execution) != 1:
            raise ConfigurationError(
                f"steps_per_execution={steps}, and weights are averaged between two executions; compile with "
                "steps_per_execution=1"
            )
        make(force)
        if self.model.train_function is not self._followed:
            self.model.train_function = self._followed = partial(self._train, self.model.train_function)

    def _train(self, function: Any, *arguments: Any) -> Any:
        """A step, and an average where one is due."""
        made = function(*arguments)
        if keras.backend.backend() != "jax" or not self.due:
            self.step()
            return made
        logs, (*groups, metrics) = made  # here Keras keeps what it trains out of its variables
        ours = [self.model.trainable_variables, self.model.non_trainable_variables, self.model.optimizer.variables]
        for variable, value in zip(itertools.chain(*ours), itertools.chain(*groups), strict=True):
            variable.assign(value)
        self.step()
        return logs, (*([each.value for each in group] for group in ours), metrics)


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
        process_group: As in :func:`gradwire.periodic`, and so are the options and what is raised.
        **options: ``every``, ``method``, ``outer`` and all others; ``moments="reset"`` is refused.
    """
    model, optimizer = parts(target)

    def mirror() -> Mirror:
        check(optimizer, model)
        if getattr(optimizer, "inner_optimizer", optimizer).use_ema and options.get("moments") != "average":
            raise ConfigurationError(
                "use_ema at last replaces weights by moving averages, which each rank has of its own; choose "
                "moments='average', which averages them, too"
            )
        others = [each for each in getattr(model, "non_trainable_variables", ()) if buffers and "float" in each.dtype]
        return Mirror(cells(optimizer._trainable_variables), _moments(optimizer).__getitem__, cells(others))

    handle = mirrored(Periodic, mirror, {**options, "broadcast": broadcast, "process_group": process_group})
    handle.hold(target, broadcast, process_group)
    if model is not None:
        vars(model)["make_train_function"] = partial(handle._make_train_function, model.make_train_function)
    return handle


def _moments(optimizer: Any) -> list[dict[str, Cell]]:
    """What an optimizer keeps of each variable, which Keras tells by its name only."""
    variables = optimizer._trainable_variables
    found: list[dict[str, Cell]] = [{} for _ in variables]
    paths = sorted(((each.path.replace("/", "_") + "_", place) for place, each in enumerate(variables)), reverse=True)
    for each, cell in zip(optimizer.variables, cells(optimizer.variables), strict=True):
        for path, place in paths:  # the longest first
            key = each.name.removeprefix(path)
            if key != each.name and each.shape == variables[place].shape and key not in found[place]:
                found[place][key] = cell
                break
    return found
