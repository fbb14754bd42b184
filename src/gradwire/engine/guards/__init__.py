"""What is done around every average, whatever the method."""

from gradwire.engine.guards.audit import Audit, Auditor, Deviation
from gradwire.engine.guards.digest import Digest
from gradwire.engine.guards.guard import Guard, Progress
from gradwire.engine.guards.unused import Unused

__all__ = ["Audit", "Auditor", "Deviation", "Digest", "Guard", "Progress", "Unused"]
