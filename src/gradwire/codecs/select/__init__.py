"""Which coordinates are sent."""

from gradwire.codecs.select.bins import LocalMaxima
from gradwire.codecs.select.criterion import Choice, Criterion, Thresholds
from gradwire.codecs.select.exponential import ExponentialTail
from gradwire.codecs.select.normal import NormalTail
from gradwire.codecs.select.proportional import Proportional
from gradwire.codecs.select.random import SharedRandom
from gradwire.codecs.select.selector import Selector, count_for, counts_for
from gradwire.codecs.select.sides import EitherSide, OneSide
from gradwire.codecs.select.thresholds import Fixed, HalfMaximum, Steps
from gradwire.codecs.select.top import TopMagnitudes
from gradwire.codecs.select.variance import Unambiguous
from gradwire.codecs.select.warmup import WarmUp

__all__ = [
    "Choice",
    "Criterion",
    "EitherSide",
    "ExponentialTail",
    "Fixed",
    "HalfMaximum",
    "LocalMaxima",
    "NormalTail",
    "OneSide",
    "Proportional",
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
