"""What is done around every average, whatever the method."""

from gradwire.train.guards.audit import Audit, Auditor, Deviation
from gradwire.train.guards.digest import Digest
from gradwire.train.guards.guard import Guard
from gradwire.train.guards.guarding import VERIFY_EVERY, Guarding

__all__ = ["VERIFY_EVERY", "Audit", "Auditor", "Deviation", "Digest", "Guard", "Guarding"]
