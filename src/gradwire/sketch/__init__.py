"""Sketches: small linear summaries of a block that tell where it is large."""

from gradwire.sketch.count import CountSketch

__all__ = ["CountSketch"]
