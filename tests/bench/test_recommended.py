"""What the library takes where no method is given is what was measured, and it says so."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from gradwire.engine import recipes as library
from gradwire.engine.choices import Choices
from gradwire.engine.mixture import configure
from gradwire.engine.recipes import Recipe
from gradwire.errors import ConfigurationError
from gradwire.layout import flat_slots
from gradwire.local import LocalWorld
from gradwire_bench import recipes as measured
from gradwire_bench.recipes import CANDIDATES, Row


def suiting(rows: Sequence[Row]) -> dict[str, Recipe]:
    """Lines that keep the accuracy as they are pasted: in every cell of so many workers with more than dense averages.

    With other numbers of workers fewer were trained, and what was does not lose it. Where no line keeps it in every
    cell, the one that loses least where it loses most.
    """
    cells = {row.cell for row in rows if row.method != "ddp" and row.workers == library.MEASURED_WITH}
    most, found = dict[str, float](), dict[str, Recipe]()
    for method in [each.method for each in CANDIDATES if each.kind == "gradient"]:
        every = [row for row in rows if row.method == method]
        own = [row for row in every if row.workers == library.MEASURED_WITH]
        pasted = [row.pasted for row in own if row.pasted is not None]
        if len(own) == len(pasted) == len(cells):
            workloads = tuple(dict.fromkeys(row.workload for row in own))
            fewer = float(f"{min(row.fewer_bytes for row in own):.3g}")
            gathered = configure(method, {}, Choices()).rules[0].route == "gather"
            found[method] = Recipe(method, fewer, round(max(pasted), 2), workloads, gathered)
            most[method] = max(
                math.inf if row.pasted is None else row.pasted / measured.limit(row.workload) for row in every
            )
    least = min(most.values(), default=math.inf)
    return {method: line for method, line in found.items() if most[method] <= max(1, least)}


def fewest(rows: Sequence[Row]) -> tuple[Recipe, ...]:
    """The one with the fewest bytes of those that are gathered, if two workers gain by it, and of the others."""
    lines = sorted(suiting(rows).values(), key=lambda line: -line.fewer_bytes)
    others = [line for line in lines if not line.gathered][:1]
    gathered = [line for line in lines if line.gathered][:1]
    return (*(line for line in gathered if all(line.saving(2) > other.saving(2) for other in others)), *others)


def test_the_library_takes_what_was_measured() -> None:
    """Where this fails because more was measured, the table of ``gradwire/engine/recipes.py`` is to be what it says."""
    trainings = measured.load(measured.MEASURED)
    rows = [row for row in measured.rows(trainings) if row.seeds >= measured.SEEDS]
    optimizers = dict.fromkeys(row.optimizer for row in rows if row.method != "ddp")
    found = {optimizer: fewest([row for row in rows if row.optimizer == optimizer]) for optimizer in optimizers}
    assert {name: each for name, each in found.items() if each} == library.RECIPES
    assert fewest(rows) == library.EVERY


def test_what_is_gathered_is_left_to_few_workers() -> None:
    """n workers gather n - 1 payloads each, and dense averages stay below two; bits as the meter counts them."""
    few, many = library.RECIPES["sgd"]
    assert few.gathered
    assert not many.gathered
    taken = [library.written_out("recipe:sgd", workers) for workers in (1, 2, 4, 8, 16, 64)]
    assert taken == [few.method] * 2 + [many.method] * 4
    slots = flat_slots([("embed", (64, 96)), ("weight", (96, 128))])
    for line in (few, many):
        worlds = [LocalWorld(configure(line.method, {}, Choices()), slots, workers) for workers in (2, 4)]
        sent = [world.average([torch.randn(slots[-1].stop) for _ in world.engines]).sent_bytes for world in worlds]
        dense = [2 * (workers - 1) / workers * 4 * slots[-1].stop for workers in (2, 4)]
        two, four = (whole / own for whole, own in zip(dense, sent, strict=True))
        assert two / four == pytest.approx(line.saving(2) / line.saving(4), rel=0.05)


def test_without_an_optimizer_it_says_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "EVERY", ())
    with pytest.raises(
        ConfigurationError, match=r"Name yours: 'recipe:sgd' takes .*'recipe:adamw' takes subspace:.*'auto'"
    ):
        library.written_out("recipe", 4)
    monkeypatch.setattr(library, "EVERY", library.RECIPES["adamw"])
    assert library.written_out("recipe", 64) == library.RECIPES["adamw"][-1].method
    with pytest.raises(ConfigurationError, match="did you mean 'adamw'"):
        library.written_out("recipe:adam", 4)
    assert library.written_out("topk:ratio=0.1", 4) == "topk:ratio=0.1"


@pytest.mark.parametrize("name", library.RECIPES)
def test_recipes_can_be_attached(name: str) -> None:
    for workers in (4, 64):
        line = max(library.RECIPES[name], key=lambda line: line.saving(workers))
        plain = configure(line.method, {}, Choices())
        assert configure(f"recipe:{name}", {}, Choices(), workers).describe() == plain.describe()
        mixed = configure({"embed*": f"recipe:{name}", "*": "dense"}, {}, Choices(), workers)
        assert mixed.rules[0].describe() == plain.describe()


@pytest.mark.parametrize("name", ["recipe", *(f"recipe:{name}" for name in library.RECIPES)])
@pytest.mark.parametrize("workers", [2, 4, 64])
def test_what_is_given_counts_instead_of_what_a_line_says(name: str, workers: int) -> None:
    given = configure(name, {"bits": 3}, Choices(route="gather"), workers)
    assert given.describe() == configure("subspace:bits=3,route=gather", {}, Choices()).describe()
    assert configure({"*": name}, {}, Choices(route="gather"), workers).rules[0].route == "gather"
    with pytest.raises(ConfigurationError, match="'subspace' has no option 'ratio'; its options: bits, rank"):
        configure(name, {"ratio": 0.1}, Choices(), workers)
