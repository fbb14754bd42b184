"""Where segments end, by name."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from gradwire.errors import ConfigurationError
from gradwire.registry import Registry

WHOLE_ROWS = "whole rows"
"""How a saved configuration says that owners have such."""


@dataclass(frozen=True)
class Granularity:
    """Where segments end.

    Attributes:
        scope: ``"layer"`` (one segment a parameter), ``"bucket"`` (one a DDP bucket), ``"model"`` (one for the whole
            gradient), ``"block"`` (``size`` consecutive elements of a parameter each), ``"row"`` (the weights of a unit
            or filter each: ``parameter[i]``, a vector whole), or one of your own.
        size: Elements of a segment, for ``"block"`` only; 0 otherwise.
        rows: Whether owners on the sharded route have whole rows, ``parameter[i]``, where there are as many as owners.
        length: For ``"row"``, or a scope of your own: how many consecutive elements of a parameter of some shape are a
            segment.
    """

    scope: str
    size: int = 0
    rows: bool = False
    length: Callable[[tuple[int, ...]], int] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.scope == "block" and not 1 <= self.size <= sys.maxsize:
            raise ConfigurationError(
                f"granularity='block:{self.size}' is out of range; choose 'block:N' with N >= 1, such as 'block:512'"
            )

    @classmethod
    def parse(cls, text: str | Granularity) -> Granularity:
        """Reads ``layer``, ``bucket``, ``model``, ``block:N``, ``row``, or a name of your own.

        Raises:
            ConfigurationError: If ``text`` is none of these.
        """
        return text if isinstance(text, Granularity) else granularities.make(text)

    def segment(self, shape: tuple[int, ...]) -> int:
        """Elements of a segment in a parameter of some shape, at least 1; the last may have fewer.

        Raises:
            ConfigurationError: If a scope of your own gives none.
        """
        numel = math.prod(shape)
        if self.length is None:
            return max(self.size or numel, 1)
        found = self.length(shape) if numel else 1
        if found < 1:
            raise ConfigurationError(
                f"granularity={str(self)!r} gives {found!r} elements to a segment of shape {shape}; give at least 1"
            )
        return found

    def unit(self, shape: tuple[int, ...]) -> int:
        """Elements of a parameter of some shape that owners do not divide; 0 if any may be."""
        return math.prod(shape[1:]) if self.rows and len(shape) > 1 else self.size

    @property
    def joins(self) -> bool:
        """Whether what lies in one buffer is one segment, however many parameters that are."""
        return self.scope in ("bucket", "model")

    @property
    def most(self) -> int:
        """The most elements of a segment; no limit where that depends on parameters."""
        return self.size or sys.maxsize

    def __str__(self) -> str:
        return f"{self.scope}:{self.size}" if self.size else self.scope


granularities: Registry[Callable[..., Granularity]] = Registry("granularity")
register = granularities.register
names = granularities.names
parse = Granularity.parse

register("layer")(lambda: Granularity("layer"))
register("bucket")(lambda: Granularity("bucket"))
register("model")(lambda: Granularity("model"))
register("block:N")(lambda size: Granularity("block", size))
register("row")(lambda: Granularity("row", length=lambda shape: math.prod(shape[1:] if len(shape) > 1 else shape)))
