"""Which tensors are not worth compressing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from gradwire.errors import ConfigurationError
from gradwire.plain import Plain


@dataclass(frozen=True)
class DensePolicy(Plain):
    """Tensors that are averaged densely, in the same round as the compressed ones.

    Biases and normalisation weights are few bytes and matter much, so they are left alone unless told otherwise.

    Attributes:
        below: Tensors of fewer elements go dense; 0 for none.
        vectors: Whether tensors of one dimension or none go dense whatever their size.
    """

    below: int = 1024
    vectors: bool = True

    def __post_init__(self) -> None:
        given: Any = self.below  # a command line's may be any word
        if not (isinstance(given, Real) and self.below >= 0):
            raise ConfigurationError(f"below={self.below!r} is out of range; choose a number of elements >= 0")
        if not isinstance(self.vectors, bool):
            raise ConfigurationError(f"vectors={self.vectors!r} is no answer; choose True or False")

    def keeps_dense(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape goes dense."""
        return math.prod(shape) < self.below or (self.vectors and len(shape) < 2)

    def __str__(self) -> str:
        reasons = ["1-D tensors"] * self.vectors + [f"tensors below {self.below:,} elements"] * (self.below > 0)
        return " and ".join(reasons) or "nothing by policy"
