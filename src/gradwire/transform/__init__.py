"""Other bases, in which gradients are easier to send."""

from gradwire.transform.hadamard import Levels, Rotation

__all__ = ["Levels", "Rotation"]
