"""Which coordinates are sent."""

from gradwire.select.criterion import Choice, Criterion, Thresholds
from gradwire.select.random import SharedRandom
from gradwire.select.selector import Selector, count_for, counts_for
from gradwire.select.thresholds import Fixed, HalfMaximum, Steps
from gradwire.select.top import TopMagnitudes

__all__ = [
    "Choice",
    "Criterion",
    "Fixed",
    "HalfMaximum",
    "Selector",
    "SharedRandom",
    "Steps",
    "Thresholds",
    "TopMagnitudes",
    "count_for",
    "counts_for",
]
