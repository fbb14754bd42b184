"""What is done around every average, whatever the method."""

from gradwire.train.guards.digest import Digest
from gradwire.train.guards.guard import Guard

__all__ = ["Digest", "Guard"]
