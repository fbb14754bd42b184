"""Which coordinates are sent."""

from gradwire.select.random import SharedRandom
from gradwire.select.selector import Selector, counts_for
from gradwire.select.top import TopMagnitudes

__all__ = ["Selector", "SharedRandom", "TopMagnitudes", "counts_for"]
