"""What goes with every method, whatever the way in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.codecs.codec import Codec
from gradwire.memory import Memory
from gradwire.plain import Plain
from gradwire.policy import DensePolicy

FUSE_BYTES = 1 << 18
"""Payload to gather before a collective is issued: enough to hide its latency on ordinary networks."""


@dataclass(frozen=True)
class Choices(Plain):
    """The choices of one attachment, as they were given; :func:`gradwire.compress` documents each.

    A way in has those that make sense there in its signature, with the types and defaults that they have here, and
    begins with ``Choices.of(locals())``. So a new choice is a field here, its text in ``compress``, and a line in the
    signature of every way in that takes it.
    """

    granularity: str | None = None
    route: str | None = None
    memory: str | Memory | None = None
    owner: str | Codec | None = None
    dense: DensePolicy | None = None
    seed: int = 0
    fuse_bytes: int = FUSE_BYTES
    grad_scaler: torch.amp.GradScaler | None = None
    rollback: bool | None = None
    learning_rate: Callable[[], float] | None = None
    clip_spikes: float | None = None
    audit_every: int = 0
    verify_every: int = 0
    start: int = 0
    inside: int | str | None = None
    name: str | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Choices:
        """Those among a function's arguments."""
        return cls(**{each.name: arguments[each.name] for each in dataclasses.fields(cls) if each.name in arguments})

    def arguments(self) -> dict[str, Any]:
        """Those that are no defaults, to be handed on to another way in."""
        given = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {name: value for name, value in given.items() if value is not getattr(Choices, name)}
