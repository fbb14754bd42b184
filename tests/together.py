"""Cases too small for tests of their own: what pytest does around a test takes longer than what a kernel does in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from itertools import product
from typing import Any

import pytest


def together(
    names: str | tuple[str, ...], values: Iterable[Any], ids: Iterable[str] | Callable[[Any], str] = str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As ``pytest.mark.parametrize``, with all values in one test; several of them are one test of all combinations.

    Every case is run whatever became of those before it; what the first one that failed raised is raised, with a note
    of the names of all that failed.
    """
    values = list(values)
    known = map(ids, values) if callable(ids) else ids
    rows = [(name, value if isinstance(names, tuple) else (value,)) for name, value in zip(known, values, strict=True)]
    keys = names if isinstance(names, tuple) else (names,)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        body, axes = getattr(test, "together", (test, []))
        axes = [[(name, dict(zip(keys, row, strict=True))) for name, row in rows], *axes]

        @wraps(test)
        def all_of_them(**given: Any) -> None:
            failed: dict[str, BaseException] = {}
            for case in product(*axes):
                try:
                    body(**given, **{key: value for _, row in case for key, value in row.items()})
                except (Exception, pytest.fail.Exception) as error:
                    failed["-".join(name for name, _ in case)] = error
            for error in failed.values():
                error.add_note(f"failed: {', '.join(failed)}")
                raise error

        signature = inspect.signature(test)
        left = [each for name, each in signature.parameters.items() if name not in keys]
        all_of_them.together = body, axes  # type: ignore[attr-defined]
        all_of_them.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return all_of_them

    return decorate
