"""Arrays of other frameworks: what is known of them, and what stands for them here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from gradwire.errors import ConfigurationError
from gradwire.layout import as_matrix

Array = np.ndarray[Any, np.dtype[Any]]

CPU = torch.device("cpu")


class Cell(NamedTuple):
    """An array that a framework trains: its dtype as numpy names it, its values now, and what replaces them."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Array]
    write: Callable[[Array], object]


def stand_in(cell: Cell, device: torch.device = CPU) -> Parameter:
    """A parameter of an array's kind, as a matrix and without its room.

    Raises:
        ConfigurationError: If the array is not of real numbers that torch has, too.
    """
    dtype = getattr(torch, cell.dtype, None)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigurationError(f"{cell.name!r} has dtype {cell.dtype}; gradwire averages gradients of real numbers")
    return Parameter(torch.zeros((), dtype=dtype, device=device).expand(as_matrix(cell.shape)))


def bytes_of(array: Array) -> Tensor:
    """An array's memory, whatever its dtype."""
    return torch.from_numpy(array.reshape(-1).view(np.uint8))
