"""What is taken where no method is given: lines that were measured to keep the accuracy as they are pasted."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from gradwire.errors import ConfigurationError, did_you_mean
from gradwire.methods import Method, parse

RECIPE = "recipe"

_log = logging.getLogger("gradwire")


@dataclass(frozen=True)
class Recipe:
    """A line that keeps the accuracy, or most of it, at the learning rate that dense averages train best with.

    Attributes:
        method: The line, as on the command line.
        fewer_bytes: How many times fewer than dense averages, with :data:`MEASURED_WITH` workers.
        lost: What the workload that loses most loses, in points of accuracy or percent of the loss; below zero where it
            gains.
        workloads: On what that was measured.
        gathered: Whether each worker's payload goes to all others, so that more workers gain less.
    """

    method: str
    fewer_bytes: float
    lost: float
    workloads: tuple[str, ...]
    gathered: bool = False

    def saving(self, workers: int) -> float:
        """How many times fewer bytes so many workers, two or more, send than in a dense ring all-reduce."""
        return self.fewer_bytes * (MEASURED_WITH / workers if self.gathered else 1.0)

    def beside(self, given: Collection[str]) -> str:
        """The line without the options and choices that are given, which count instead of those it has."""
        name, _, written = self.method.partition(":")
        return f"{name}:{','.join(each for each in written.split(',') if each.partition('=')[0] not in given)}".rstrip(
            ":"
        )

    def told(self, workers: int) -> str:
        """The line and why it is taken."""
        changed = f"at least {-self.lost:.2f}" if self.lost < 0 else f"at most {self.lost:.2f}"
        what = f"{changed} points of accuracy or percent of the loss {'gained' if self.lost < 0 else 'lost'}"
        *others, last = self.workloads
        where = f"{', '.join(others)} and {last}" if others else last
        return f"{self.method} ({self.saving(workers):.3g} x fewer bytes with {workers} workers; {what} on {where})"


MEASURED_WITH = 4

RECIPES = {
    "sgd": (
        Recipe("subspace:bits=0.8", 19.9, 0.03, ("image", "language"), gathered=True),
        Recipe("subspace:bits=0.8,route=sharded", 39.5, 0.01, ("image", "language")),
    ),
    "momentum": (
        Recipe("subspace:bits=1.5,route=sharded", 21.1, 0.48, ("image", "alexnet", "resnet20", "gpt", "language")),
    ),
    "adamw": (
        Recipe("subspace:bits=1.5,route=sharded", 21.1, 0.57, ("image", "alexnet", "resnet20", "gpt", "language")),
    ),
    "muon": (Recipe("subspace:bits=1.5,route=sharded", 21.3, 0.77, ("gpt", "language")),),
}
"""By what takes the averages; ``momentum`` is SGD with momentum 0.9, ``muon`` Muon for hidden matrices beside AdamW. Of
those that are gathered, and of the others, the line with the fewest bytes; where none keeps the accuracy of all that
was trained, the one that loses least. A test holds them to all that was measured."""

EVERY: tuple[Recipe, ...] = (
    Recipe("subspace:bits=1.5,route=sharded", 21.1, 0.77, ("image", "alexnet", "resnet20", "gpt", "language")),
)
"""The same under all of them."""


def written_out(method: str | Method, workers: int, given: Collection[str] = ()) -> str | Method:
    """A method in place of the name of a recipe, the one with which so many workers send least; or what was given.

    One worker, who sends nothing, takes what two would. Rank 0 logs what is taken, and why.

    Args:
        method: A method, or the name of a recipe.
        workers: How many there are.
        given: Options and choices that are given beside it, which count; a line that has none of them written is taken
            rather than others.

    Raises:
        ConfigurationError: If there is no such recipe; or if no optimizer is named, and no line suits all.
    """
    lines = _lines(method, given)
    if lines is None:
        return method
    workers = max(workers, 2)
    if not lines:
        known = "; ".join(
            f"'{RECIPE}:{name}' takes {_least(each, workers).told(workers)}" for name, each in RECIPES.items()
        )
        raise ConfigurationError(
            "no method is given, and what keeps the accuracy depends on the optimizer, which cannot be known here: no "
            f"line was measured to keep it under all of them. Name yours: {known}. Or give a method, or 'auto' for "
            "what is fastest on this network; gradwire recipes has all that was measured"
        )
    taken = _least(lines, workers)
    if not dist.is_initialized() or dist.get_rank() == 0:
        beside = f", but for the {' and '.join(sorted(given))} given here" if given else ""
        _log.warning(
            "%s takes %s, measured at the learning rate of dense averages%s", method, taken.told(workers), beside
        )
    return taken.beside(given)


def others(method: str | Method, given: Collection[str] = ()) -> tuple[str, ...]:
    """What a recipe takes with some number of workers; nothing where a method is given."""
    return tuple(line.beside(given) for line in _lines(method, given) or ())


def _lines(method: str | Method, given: Collection[str]) -> Sequence[Recipe] | None:
    """A recipe's, without those that have written what is given; None where a method is given."""
    if not isinstance(method, str) or method.partition(":")[0] != RECIPE:
        return None
    optimizer = method.partition(":")[2]
    if optimizer and optimizer not in RECIPES:
        raise ConfigurationError(
            f"method={method!r} is no recipe; {did_you_mean(optimizer, RECIPES)}choose {_names()}, or give a method"
        )
    lines = RECIPES[optimizer] if optimizer else EVERY
    return [line for line in lines if not parse(line.method)[1].keys() & set(given)] or lines


def _least(lines: Sequence[Recipe], workers: int) -> Recipe:
    return max(lines, key=lambda line: line.saving(workers))


def _names() -> str:
    return ", ".join(f"'{RECIPE}:{name}'" for name in RECIPES)
