"""Numbers as Python has them, whatever library they came from.

Configurations are compared over ranks as text and saved as values, so ``np.int64(8)`` and ``8`` are to be one.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from numbers import Integral, Real
from typing import Any


def plain(value: Any) -> Any:
    """A number of NumPy's, torch's or another library's as Python's own, also those in a tuple; all else as it is."""
    if isinstance(value, tuple):
        numbers = [plain(each) for each in value]
        if all(map(operator.is_, numbers, value)):
            return value
        return type(value)(*numbers) if hasattr(value, "_fields") else tuple(numbers)
    shape = getattr(value, "shape", None)
    if shape == () and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, Integral) or (hasattr(type(value), "__index__") and shape is None):
        return value if isinstance(value, bool) else int(operator.index(value))
    return float(value) if isinstance(value, Real) else value


def number(value: Any) -> float:
    """What a value is as a float: NaN for what is no single number, such as text."""
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):  # the third of a tensor of several values
        if not isinstance(value, str | bytes | bool):
            return float(value)
    return math.nan


class Plain:
    """A dataclass whose numbers are Python's own when they are made valid, as :func:`plain` has them."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "__post_init__" in cls.__dict__:
            cls.__post_init__ = _after_plain(cls.__dict__["__post_init__"])  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        """Makes its fields plain."""
        _make_plain(self)


def _after_plain(check: Callable[..., None]) -> Callable[..., None]:
    """What makes fields plain, then does what a class does itself once they are there."""

    @wraps(check)
    def post_init(self: Plain, *given: Any) -> None:
        _make_plain(self)
        check(self, *given)

    return post_init


def _make_plain(made: Any) -> None:
    for field in dataclasses.fields(made):
        given = getattr(made, field.name, None)
        if (found := plain(given)) is not given:
            object.__setattr__(made, field.name, found)
