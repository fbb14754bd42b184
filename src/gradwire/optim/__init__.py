"""Optimizers that send moments and not gradients."""

from gradwire.optim.adam import CompressedAdam
from gradwire.optim.averaging import AveragingOptimizer
from gradwire.optim.lamb import OneBitLamb
from gradwire.optim.onebit import OneBitAdam
from gradwire.optim.zeroone import ZeroOneAdam

__all__ = ["AveragingOptimizer", "CompressedAdam", "OneBitAdam", "OneBitLamb", "ZeroOneAdam"]
