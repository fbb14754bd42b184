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

    Verified against DeepSpeed's LoCo, which is its first author's (pull request 6730), not the paper's text: workers
    and owners each compensate what they quantise, ``err_beta=0.8``, and forget all every ``reset_T=1024`` steps, as
    that is documented: its counter counts tensors. It keeps the average in 8 bits a value, in the blocks of the
    gradient; here it is float32. Levels and blocks differ as those of ``qgz`` do. An older form of the same author
    (XingyuXie/Megatron-LM) has one fixed distance between levels for all values, forgets every 512 steps,
    ``memory=gradwire.memory.LowPass(reset=512)``, and owners quantise nothing.
    """

    citation = "Xie et al. 2024, arXiv:2407.04480"
    published = Published(
        "The average of past errors is float32, there 8 bits a value. Levels and blocks differ as those of `qgz` do."
    )
    memory = "lowpass"
