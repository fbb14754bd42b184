"""All choices of one attachment, made valid once and the same on every rank."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from gradwire import memory as memories
from gradwire.errors import ConfigurationError
from gradwire.layout import Granularity
from gradwire.memory import Memory
from gradwire.methods import Method, make, name_of
from gradwire.train.policy import DensePolicy

FUSE_BYTES = 1 << 18
"""Payload to gather before a collective is issued: enough to hide its latency on ordinary networks."""


@dataclass(frozen=True)
class Configuration:
    """Method, granularity, route, memory and what else decides the bytes.

    Attributes:
        method: What is sent.
        granularity: Where segments end.
        route: How payloads become an average.
        memory: What is carried from step to step.
        dense: What is averaged densely.
        seed: Where all randomness starts.
        fuse_bytes: Payload to gather before a collective is issued, in bytes.
    """

    method: Method
    granularity: Granularity
    route: str
    memory: Memory
    dense: DensePolicy
    seed: int
    fuse_bytes: int

    @classmethod
    def make(
        cls,
        method: str | Method,
        options: dict[str, Any],
        granularity: str | Granularity | None = None,
        route: str | None = None,
        memory: str | Memory | None = None,
        dense: DensePolicy | None = None,
        seed: int = 0,
        fuse_bytes: int = FUSE_BYTES,
    ) -> Configuration:
        """Checks all choices against each other; None stands for the method's own.

        Raises:
            ConfigurationError: If one is unknown, out of range, or not for this method.
        """
        made = make(method, options)
        name = name_of(made)
        scope = Granularity.parse(made.granularities[0] if granularity is None else granularity)
        if scope.scope not in made.granularities:
            raise ConfigurationError(
                f"{name} cannot work at granularity={str(scope)!r}; its own: {', '.join(made.granularities)}"
            )
        way = made.routes[0] if route is None else route
        if way not in made.routes:
            raise ConfigurationError(f"{name} cannot take route={way!r}; its routes: {', '.join(made.routes)}")
        if fuse_bytes < 1:
            raise ConfigurationError(f"fuse_bytes={fuse_bytes!r} is out of range; choose at least 1 byte")
        return cls(
            method=made,
            granularity=scope,
            route=way,
            memory=memories.parse(made.memory if memory is None else memory),
            dense=dense or DensePolicy(),
            seed=seed,
            fuse_bytes=fuse_bytes,
        )

    def compresses(self, shape: tuple[int, ...]) -> bool:
        """Whether the method takes a tensor of this shape; otherwise it is averaged densely."""
        if self.method.takes_all:
            return True
        return not self.dense.keeps_dense(shape) and self.method.accepts(shape)

    def describe(self) -> dict[str, str]:
        """Everything that must be the same on all ranks, as text."""
        options = {field.name: getattr(self.method, field.name) for field in dataclasses.fields(self.method)}  # type: ignore[arg-type]
        return {
            "method": name_of(self.method),
            **{name: str(value) for name, value in options.items()},
            "granularity": str(self.granularity),
            "route": self.route,
            "memory": str(self.memory),
            "dense": str(self.dense),
            "seed": str(self.seed),
            "fuse_bytes": str(self.fuse_bytes),
        }

    def __str__(self) -> str:
        described = self.describe()
        name = described.pop("method")
        tail = [described.pop(key) for key in ("dense", "seed", "fuse_bytes")]
        return f"{name}({', '.join(f'{key}={value}' for key, value in described.items())}, dense: {tail[0]})"
