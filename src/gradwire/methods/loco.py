"""LoCo."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.methods.published import Published
from gradwire.methods.qgz import QgZ
from gradwire.methods.registry import register


@register("loco")
@dataclass(frozen=True, kw_only=True)
class LoCo(QgZ):
    """ZeRO++'s block-quantised gradients with a moving average of past errors: ``e = 0.8 e + 0.2 (g + e - Q(g + e))``.

    Workers and owners each compensate what they quantise, and forget all every 1024 steps, as in DeepSpeed's LoCo. That
    keeps the average in 8 bits a value; here it is float32. The paper's text was not at hand, only its abstract.
    """

    citation = "Xie et al. 2024, arXiv:2407.04480"
    published = Published("The average of past errors is float32, there 8 bits a value.")
    memory = "lowpass"
