"""What a worker carries from step to step: memories, and the store that keeps their tensors by parameter name."""

from gradwire.memory.dgc import MaskedMomentum
from gradwire.memory.diana import Diana
from gradwire.memory.ef21 import EF21
from gradwire.memory.feedback import NONE, OWED, Feedback, Memory, NoMemory, Remainder
from gradwire.memory.kind import Kind
from gradwire.memory.lowpass import LowPass
from gradwire.memory.momentum import Momentum
from gradwire.memory.names import BUILT_IN, get, names, parse, register
from gradwire.memory.residual import Residual
from gradwire.memory.snapshot import Snapshot
from gradwire.memory.store import Store

__all__ = [
    "BUILT_IN",
    "EF21",
    "NONE",
    "OWED",
    "Diana",
    "Feedback",
    "Kind",
    "LowPass",
    "MaskedMomentum",
    "Memory",
    "Momentum",
    "NoMemory",
    "Remainder",
    "Residual",
    "Snapshot",
    "Store",
    "get",
    "names",
    "parse",
    "register",
]
