"""Arrays of other frameworks: their names and shapes, and what stands for them here."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire.errors import ConfigurationError
from gradwire.layout import as_matrix

Array = np.ndarray[Any, np.dtype[Any]]

CPU = torch.device("cpu")


class Described(NamedTuple):
    """An array that a framework trains: its name, shape, and dtype as numpy names it."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def stand_in(array: Described, device: torch.device = CPU) -> Parameter:
    """A parameter of an array's kind, as a matrix and without its room.

    Raises:
        ConfigurationError: If the array is not of real numbers that torch has, too.
    """
    dtype = getattr(torch, array.dtype, None)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigurationError(f"{array.name!r} has dtype {array.dtype}; gradwire averages gradients of real numbers")
    return Parameter(torch.zeros((), dtype=dtype, device=device).expand(as_matrix(array.shape)))


def bytes_of(array: Array) -> Tensor:
    """An array's memory, whatever its dtype."""
    return torch.from_numpy(array.reshape(-1).view(np.uint8))
