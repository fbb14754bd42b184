"""What a coding is handed is there to be read: the residual is made of it once it is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.errors import ConfigurationError
from gradwire.memory import Feedback


@contextmanager
def untouched(given: Tensor, name: str, reader: object) -> Iterator[None]:
    """Around a coding's ``encode``: torch counts what is written to a tensor, so it takes microseconds.

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


def as_admitted(admitted: Tensor, feedback: Feedback, codec: Codec) -> AbstractContextManager[None]:
    """The same around a codec, of what a memory admitted, unless the memory itself changes that: it masks what went."""
    return nullcontext() if feedback.masks else untouched(admitted, "gradient", codec)


def version(tensor: Tensor) -> int:
    """Counts what is written to a tensor; inference tensors count nothing."""
    return -1 if tensor.is_inference() else tensor._version
