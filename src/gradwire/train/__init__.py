"""The ways in: a DDP model, or parameters and a loop of one's own."""

from gradwire.train.alone import Roundtrip, roundtrip
from gradwire.train.configuration import Configuration
from gradwire.train.ddp import compress
from gradwire.train.guards import Audit, Deviation
from gradwire.train.handle import Handle
from gradwire.train.moments import SecondMoments
from gradwire.train.per_rank import PerRank
from gradwire.train.policy import DensePolicy
from gradwire.train.redistribution import redistribute
from gradwire.train.stats import Stats
from gradwire.train.synchronizer import Synchronizer

__all__ = [
    "Audit",
    "Configuration",
    "DensePolicy",
    "Deviation",
    "Handle",
    "PerRank",
    "Roundtrip",
    "SecondMoments",
    "Stats",
    "Synchronizer",
    "compress",
    "redistribute",
    "roundtrip",
]
