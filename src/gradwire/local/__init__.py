"""A world of workers in one process: what a method does to tensors, without a process group."""

from gradwire.local.alone import Roundtrip, roundtrip
from gradwire.local.analysis import Analysis, analyze
from gradwire.local.laws import Check, check
from gradwire.local.world import LocalWorld, Step

__all__ = ["Analysis", "Check", "LocalWorld", "Roundtrip", "Step", "analyze", "check", "roundtrip"]
