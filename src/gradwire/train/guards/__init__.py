"""What is done around every average, whatever the method."""

from gradwire.train.guards.audit import Audit, Auditor, Deviation
from gradwire.train.guards.guard import Guard
from gradwire.train.guards.guarding import Guarding

__all__ = ["Audit", "Auditor", "Deviation", "Guard", "Guarding"]
