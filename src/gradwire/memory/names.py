"""Memories by name."""

from __future__ import annotations

from collections.abc import Callable

from gradwire.errors import ConfigurationError
from gradwire.memory.dgc import MaskedMomentum
from gradwire.memory.diana import Diana
from gradwire.memory.ef21 import EF21
from gradwire.memory.feedback import Memory, NoMemory
from gradwire.memory.lowpass import LowPass
from gradwire.memory.momentum import Momentum
from gradwire.memory.residual import Residual

NAMES: dict[str, Callable[[], Memory]] = {
    "none": NoMemory,
    "residual": Residual,
    "momentum": Momentum,
    "dgc": MaskedMomentum,
    "ef21": EF21,
    "lowpass": LowPass,
    "diana": Diana,
}
"""What a name stands for, with the paper's weights."""


def parse(memory: str | Memory) -> Memory:
    """Reads a name of :data:`NAMES`.

    Raises:
        ConfigurationError: If ``memory`` is neither a name nor a memory.
    """
    if isinstance(memory, Memory):
        return memory
    if memory in NAMES:
        return NAMES[memory]()
    raise ConfigurationError(
        f"memory={memory!r} is not known; choose {', '.join(map(repr, NAMES))}, or an object such as "
        "gradwire.memory.Residual(beta=0.9)"
    )
