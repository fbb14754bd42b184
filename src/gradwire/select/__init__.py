"""Which coordinates are sent."""

from gradwire.select.bins import LocalMaxima
from gradwire.select.criterion import Choice, Criterion, Thresholds
from gradwire.select.exponential import ExponentialTail
from gradwire.select.random import SharedRandom
from gradwire.select.selector import Selector, count_for, counts_for
from gradwire.select.sides import EitherSide
from gradwire.select.thresholds import Fixed, HalfMaximum, Steps
from gradwire.select.top import TopMagnitudes
from gradwire.select.variance import Unambiguous
from gradwire.select.warmup import WarmUp

__all__ = [
    "Choice",
    "Criterion",
    "EitherSide",
    "ExponentialTail",
    "Fixed",
    "HalfMaximum",
    "LocalMaxima",
    "Selector",
    "SharedRandom",
    "Steps",
    "Thresholds",
    "TopMagnitudes",
    "Unambiguous",
    "WarmUp",
    "count_for",
    "counts_for",
]
