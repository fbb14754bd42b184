"""What is taken where no method is given: lines that were measured to keep the accuracy as they are pasted."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch.distributed as dist

from gradwire.errors import ConfigurationError, did_you_mean
from gradwire.methods import Method

RECIPE = "recipe"

_log = logging.getLogger("gradwire")


@dataclass(frozen=True)
class Recipe:
    """A line that keeps the accuracy at the learning rate that dense averages train best with.

    Attributes:
        method: The line with the fewest bytes of which that was measured, as on the command line.
        fewer_bytes: How many times fewer than dense averages, with 4 workers; what is gathered goes to all others, so
            with more workers the gain is less.
        lost: What the workload that loses most loses, in points of accuracy or percent of the loss; below zero where it
            gains.
        workloads: On what that was measured.
    """

    method: str
    fewer_bytes: float
    lost: float
    workloads: tuple[str, ...]

    def __str__(self) -> str:
        what = f"{-self.lost:.2f} gained" if self.lost < 0 else f"{self.lost:.2f} lost"
        where = " and ".join(self.workloads)
        return f"{self.method} ({self.fewer_bytes:.3g} x fewer bytes with 4 workers, {what} on {where})"


RECIPES = {
    "sgd": Recipe("qsgd:bits=4", 5.16, -0.11, ("image",)),
    "momentum": Recipe("powersgd:rank=4,bits=16", 36.7, -0.04, ("image",)),
    "adamw": Recipe("subspace:bits=1.5", 10.6, 0.78, ("image", "gpt")),
}
"""By what takes the averages; ``momentum`` is SGD with momentum 0.9. A test holds them to all that was measured."""

EVERY: Recipe | None = None
"""A line that keeps the accuracy under all of them; None as long as none was measured to."""


def written_out(method: str | Method) -> str | Method:
    """A method in place of the name of a recipe, and whatever else was given as it is.

    Rank 0 logs what is taken, and why.

    Raises:
        ConfigurationError: If there is no such recipe; or if no optimizer is named, and no line suits all.
    """
    if not isinstance(method, str) or method.partition(":")[0] != RECIPE:
        return method
    optimizer = method.partition(":")[2]
    if optimizer and optimizer not in RECIPES:
        raise ConfigurationError(
            f"method={method!r} is no recipe; {did_you_mean(optimizer, RECIPES)}choose {_names()}, or give a method"
        )
    taken = RECIPES[optimizer] if optimizer else EVERY
    if taken is None:
        known = "; ".join(f"'{RECIPE}:{name}' takes {each}" for name, each in RECIPES.items())
        raise ConfigurationError(
            "no method is given, and what keeps the accuracy depends on the optimizer, which cannot be known here: no "
            f"line was measured to keep it under all of them. Name yours: {known}. Or give a method, or 'auto' for "
            "what is fastest on this network; gradwire recipes has all that was measured"
        )
    if not dist.is_initialized() or dist.get_rank() == 0:
        _log.warning("%s takes %s, measured at the learning rate of dense averages", method, taken)
    return taken.method


def _names() -> str:
    return ", ".join(f"'{RECIPE}:{name}'" for name in RECIPES)
