"""What is done around every average, whatever the method."""

from gradwire.train.guards.audit import Audit, Auditor, Deviation
from gradwire.train.guards.guard import Guard

__all__ = ["Audit", "Auditor", "Deviation", "Guard"]
