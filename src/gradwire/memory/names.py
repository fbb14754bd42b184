"""Memories by name."""

from __future__ import annotations

from collections.abc import Callable

from gradwire.memory.dgc import MaskedMomentum
from gradwire.memory.diana import Diana
from gradwire.memory.ef21 import EF21
from gradwire.memory.feedback import Memory, NoMemory
from gradwire.memory.lowpass import LowPass
from gradwire.memory.momentum import Momentum
from gradwire.memory.residual import Residual
from gradwire.registry import Registry

memories: Registry[Callable[..., Memory]] = Registry(
    "memory", ", or an object such as gradwire.memory.Residual(beta=0.9)"
)
"""What a name stands for, with the paper's weights."""

register, names, get = memories.register, memories.names, memories.get

register("none")(NoMemory)
register("residual")(Residual)
register("momentum")(Momentum)
register("dgc")(MaskedMomentum)
register("ef21")(EF21)
register("lowpass")(LowPass)
register("diana")(Diana)

BUILT_IN = names()
"""Those that methods say of whether they can carry them; any method takes others that are made for it."""


def parse(memory: str | Memory) -> Memory:
    """A memory by its name, or itself.

    Raises:
        ConfigurationError: If ``memory`` is neither a name nor a memory.
    """
    return memory if isinstance(memory, Memory) else memories.make(memory)
