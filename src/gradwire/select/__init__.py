"""Which coordinates are sent."""

from gradwire.select.random import SharedRandom
from gradwire.select.selector import Selector, count_for, counts_for
from gradwire.select.top import TopMagnitudes
from gradwire.select.warmup import WarmUp

__all__ = ["Selector", "SharedRandom", "TopMagnitudes", "WarmUp", "count_for", "counts_for"]
