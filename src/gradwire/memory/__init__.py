"""What a worker carries from step to step: memories, and the store that keeps their tensors by parameter name."""

from gradwire.memory.feedback import NONE, Feedback, Memory, NoMemory, Residual, parse
from gradwire.memory.store import Store

__all__ = ["NONE", "Feedback", "Memory", "NoMemory", "Residual", "Store", "parse"]
