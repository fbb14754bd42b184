"""Local steps, then an average of what they changed: periodic averaging of parameters."""

from gradwire.train.periodic.attachment import Periodic, periodic

__all__ = ["Periodic", "periodic"]
