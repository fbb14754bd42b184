"""Local steps, then an average of what they changed: periodic averaging of parameters."""

from gradwire.periodic.attach import periodic
from gradwire.periodic.handle import Periodic

__all__ = ["Periodic", "periodic"]
