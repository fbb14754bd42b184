"""Local steps, then an average of what they changed: periodic averaging of parameters."""

from gradwire.local_sgd.attach import periodic
from gradwire.local_sgd.handle import Periodic

__all__ = ["Periodic", "periodic"]
