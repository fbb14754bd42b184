"""Options that change while training goes on: values by the step from which they count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from gradwire.errors import ConfigurationError
from gradwire.plain import plain

Value = TypeVar("Value")


def is_scheduled(options: Mapping[str, Any]) -> bool:
    """Whether one of a method's options has values by step."""
    return any(isinstance(value, Mapping) for value in options.values())


def stages(options: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Every step from which on one of the options has another value, in order, and all options from there.

    Raises:
        ConfigurationError: If a schedule has no value to begin with, or its steps are no whole numbers.

    Example:
        >>> stages({"ratio": {0: 0.25, 100: 0.01}, "values": "fp16"})
        [(0, {'ratio': 0.25, 'values': 'fp16'}), (100, {'ratio': 0.01, 'values': 'fp16'})]
    """
    scheduled = {
        name: by_step(name, values, "{0: 0.25, 100: 0.01}")
        for name, values in options.items()
        if isinstance(values, Mapping)
    }
    steps = sorted({step for values in scheduled.values() for step in values})
    return [
        (step, {**options, **{name: value_at(values, step) for name, values in scheduled.items()}}) for step in steps
    ]


def by_step(name: str, given: Mapping[Any, Value], example: str) -> dict[int, Value]:
    """Values by the step from which they count.

    Raises:
        ConfigurationError: Unless they are by whole numbers, and there is one to begin with.
    """
    values = {plain(step): value for step, value in given.items()}
    if not all(type(step) is int and step >= 0 for step in values) or 0 not in values:
        raise ConfigurationError(
            f"{name}={dict(values)!r} is no schedule; write values by the step from which they count, from 0, as in "
            f"{example}"
        )
    return values


def value_at(values: Mapping[int, Value], step: int) -> Value:
    """What counts in a step."""
    return values[max(start for start in values if start <= step)]


def joined(values: Mapping[int, Any]) -> Any:
    """Values by step as they are written: one alone where it never changes."""
    starts = sorted(values)
    changes = {
        step: values[step]
        for index, step in enumerate(starts)
        if not index or values[step] != values[starts[index - 1]]
    }
    return changes if len(changes) > 1 else values[0]
