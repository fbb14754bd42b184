"""Local steps with averages of what they changed, in a line such as those of methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.methods import parse
from gradwire_bench.contenders import Contender

PERIODIC, NESTEROV = "periodic", "nesterov"


def nesterov(tensors: Sequence[Tensor]) -> torch.optim.Optimizer:
    """DiLoCo's outer optimizer (Douillard et al. 2023, arXiv:2311.08105)."""
    return torch.optim.SGD(tensors, lr=0.7, momentum=0.9, nesterov=True)


@dataclass(frozen=True)
class Periods:
    """When changes are averaged, and what becomes of an average.

    Attributes:
        every: Local steps of a period.
        outer: Whether :func:`nesterov` takes averages for gradients; otherwise they are taken as they are.
        contender: What averages.
    """

    every: int
    outer: bool
    contender: Contender

    @classmethod
    def parse(cls, text: str) -> Periods | None:
        """Reads ``periodic:every=16,outer=nesterov,method=qsgd,bits=4``; None if it is the line of a method.

        Raises:
            ConfigurationError: If something is wrong with it.
        """
        name, options = parse(text)
        if name != PERIODIC:
            return None
        every, outer, method = options.pop("every", 8), options.pop("outer", None), options.pop("method", "dense")
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigurationError(f"{text!r}: every={every!r} must be a whole number of at least 1")
        if outer not in (None, NESTEROV):
            raise ConfigurationError(f"{text!r}: outer={outer!r} must be {NESTEROV!r} or left out")
        given = ",".join(f"{option}={value}" for option, value in options.items())
        return cls(every, outer is not None, Contender.parse(f"{method}:{given}"))

    @property
    def line(self) -> str:
        """What to paste."""
        options = "".join(f", {option}={value!r}" for option, value in self.contender.options)
        outer = f", outer={NESTEROV}" if self.outer else ""
        return f'gradwire.periodic(optimizer, every={self.every}, method="{self.contender.name}"{options}{outer})'
