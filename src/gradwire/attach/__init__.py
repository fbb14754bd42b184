"""The ways in: a DDP model, or parameters and a loop of one's own."""

from gradwire.attach.ddp import compress
from gradwire.attach.handle import Handle
from gradwire.attach.moments import SecondMoments
from gradwire.attach.synchronizer import Synchronizer

__all__ = ["Handle", "SecondMoments", "Synchronizer", "compress"]
