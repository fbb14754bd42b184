"""What a coding is handed is there to be read: the residual is made of it once it is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from gradwire.errors import ConfigurationError


@contextmanager
def untouched(given: Tensor, name: str, reader: object) -> Iterator[None]:
    """Around a coding's ``encode``: torch counts what is written to a tensor, so this costs nothing.

    Args:
        given: What it is to write.
        name: Of the argument, for messages.
        reader: The coding.

    Raises:
        ConfigurationError: If it changed what it was given.
    """
    before = version(given)
    yield
    if version(given) != before:
        raise ConfigurationError(
            f"{type(reader).__name__}.encode changed the {name} it was given, of which the residual is made, so what "
            f"it cut off would never be sent; have it work on a copy: {name} = {name}.clone()"
        )


def version(tensor: Tensor) -> int:
    """Counts what is written to a tensor; inference tensors count nothing."""
    return -1 if tensor.is_inference() else tensor._version
