"""Which coordinates are sent."""

from gradwire.select.random import SharedRandom
from gradwire.select.selector import Selector, count_for, counts_for
from gradwire.select.top import TopMagnitudes

__all__ = ["Selector", "SharedRandom", "TopMagnitudes", "count_for", "counts_for"]
