"""A model of the user's own: ``train.py:make_model``, a function in a file, or in a module that can be imported."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradwire import own
from gradwire.cost.shapes import Model
from gradwire.errors import ConfigurationError, did_you_mean
from gradwire.layout import check_tables


def is_own(text: str) -> bool:
    """Whether a text names a function, or a file that has one, rather than a known model."""
    return ":" in text or text.endswith(".py")


Step = Callable[[nn.Module], Tensor]
"""What gives the loss of a step."""


def make(text: str) -> nn.Module:
    """The module that the function makes."""
    return make_with_step(text)[0]


def make_with_step(text: str) -> tuple[nn.Module, Step | None]:
    """Calls the function and returns the module that it makes, and what gives a step's loss, if it does.

    Raises:
        ConfigurationError: If there is no such file, module or function, or it makes something else, or fails.
    """
    where, colon, function = text.rpartition(":")
    if not colon:
        raise ConfigurationError(
            f"{text!r} says no function; name the one that makes the model, as in {_first_of(Path(text))!r}"
        )
    module = own.module(where, text)
    maker = getattr(module, function, None)
    if not callable(maker):
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        near = did_you_mean(function, known) or "name one that it has"
        raise ConfigurationError(f"{text!r}: {where} has no function {function!r}; {near}")
    try:
        made = maker()
    except Exception as error:
        raise ConfigurationError(
            f"{text!r} failed: {type(error).__name__}: {error}; it is called without arguments"
        ) from error
    module, step = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or (step is not None and not callable(step)):
        raise ConfigurationError(
            f"{text!r} returned {type(made).__name__}; it must return a torch.nn.Module, or one and a function that "
            "takes the module and returns the loss of a step"
        )
    return module, step


def leaves_out(text: str, module: nn.Module, step: Step) -> bool:
    """Whether a step, which this takes to see, leaves parameters without a gradient.

    Raises:
        ConfigurationError: If it fails, or gives no loss.
    """
    try:
        step(module).backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        raise ConfigurationError(
            f"a step of {text!r} failed: {type(error).__name__}: {error}; the function that it returns beside the "
            "module takes the module and returns the loss, a tensor of one element"
        ) from error
    found = any(each.grad is None for each in module.parameters() if each.requires_grad)
    module.zero_grad(set_to_none=True)
    return found


def _first_of(path: Path) -> str:
    """A file's functions, unless it cannot be read; it is not run, as it may train."""
    try:
        found = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        found = []
    named = [each.name for each in found if isinstance(each, ast.FunctionDef | ast.ClassDef)]
    return f"{path}:{'|'.join(name for name in named if not name.startswith('_')) or 'make_model'}"


def model(text: str, made: nn.Module) -> Model:
    """The parameters of a module that require gradients, of several types as if all had the widest.

    Raises:
        ConfigurationError: If there are none, or one has no shape yet or a sparse gradient.
    """
    check_tables(made)
    if lazy := [name for name, each in made.named_parameters() if is_lazy(each)]:
        raise ConfigurationError(
            f"{text!r} has parameters without a shape, such as {lazy[0]!r}; run a batch through the model before it "
            "is returned, as lazy modules take their shapes from it"
        )
    trained = [(name, each) for name, each in made.named_parameters() if each.requires_grad]
    parameters = tuple((name, tuple(each.shape)) for name, each in trained)
    if not parameters:
        raise ConfigurationError(f"{text!r} has no parameters that require gradients; there is nothing to average")
    filters = sum(len(shape) == 4 for _, shape in parameters)
    matrices = sum(len(shape) > 1 for _, shape in parameters)
    dtype = reduce(torch.promote_types, (each.dtype for _, each in trained))
    return Model(text, parameters, "your own", "layer" if 2 * filters > matrices else "value", dtype)
