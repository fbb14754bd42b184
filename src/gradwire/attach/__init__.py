"""The ways in: a DDP model, or parameters and a loop of one's own."""

from gradwire.attach.ddp import compress
from gradwire.attach.handle import Handle
from gradwire.attach.moments import SecondMoments
from gradwire.attach.owed import Owed
from gradwire.attach.reduce_scatter import compress_reduce_scatter
from gradwire.attach.synchronizer import Synchronizer

__all__ = ["Handle", "Owed", "SecondMoments", "Synchronizer", "compress", "compress_reduce_scatter"]
