"""What is done around every average, whatever the method."""

from gradwire.train.guards.audit import Audit, Auditor, Deviation
from gradwire.train.guards.digest import Digest
from gradwire.train.guards.guard import Guard, Progress

__all__ = ["Audit", "Auditor", "Deviation", "Digest", "Guard", "Progress"]
