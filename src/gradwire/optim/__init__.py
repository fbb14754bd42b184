"""Optimizers that send moments and not gradients."""

from gradwire.optim.adam import CompressedAdam
from gradwire.optim.onebit import OneBitAdam
from gradwire.optim.zeroone import ZeroOneAdam

__all__ = ["CompressedAdam", "OneBitAdam", "ZeroOneAdam"]
