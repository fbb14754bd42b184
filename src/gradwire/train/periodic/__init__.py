"""Local steps, then an average of what they changed: periodic averaging of parameters."""

from gradwire.train.periodic.attach import periodic
from gradwire.train.periodic.handle import Periodic

__all__ = ["Periodic", "periodic"]
