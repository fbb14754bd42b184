"""dist-EF-blockSGDM."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire import memory as memories
from gradwire.methods.efsignsgd import EFSignSGD
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("blocksgdm")
@dataclass(frozen=True, kw_only=True)
class BlockSGDM(EFSignSGD):
    """Signs of the workers' Nesterov momenta, scaled block by block, with error feedback both ways.

    A block is a segment: a layer, as in the paper's experiments, unless ``granularity=`` says otherwise.
    ``memory=gradwire.memory.Momentum(nesterov=True, memory=gradwire.memory.Residual())`` changes the weights, and goes
    with any other codec, too. The momentum is a mean, ``0.9 m + 0.1 g``: the learning rate is ten times the paper's.
    Use an optimizer without momentum, and ``learning_rate=`` where it changes, by which the paper weighs what was not
    sent.
    """

    citation = "Zheng et al. 2019, arXiv:1905.10936"
    published = Published(
        "The momentum is a mean: take ten times the paper's learning rate. There what was not sent is weighed "
        "by the old rate over the new: give `learning_rate=`. Zeros count as positive."
    )
    memory = memories.Momentum(decay=0.9, nesterov=True, memory=memories.Residual())
    memories = ("none", "residual", "momentum")
