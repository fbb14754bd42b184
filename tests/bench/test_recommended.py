"""What the library takes where no method is given is what was measured, and it says so."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gradwire.engine import recipes as library
from gradwire.engine.recipes import Recipe
from gradwire.errors import ConfigurationError
from gradwire_bench import recipes as measured
from gradwire_bench.recipes import CANDIDATES, Row


def suiting(rows: Sequence[Row]) -> dict[str, Recipe]:
    """Lines that keep the accuracy in every cell with more than dense averages, at the learning rate of those."""
    compared = {(row.workload, row.optimizer) for row in rows if row.method != "ddp"}
    cells = {
        (row.workload, row.optimizer): row.learning_rate
        for row in rows
        if row.method == "ddp" and (row.workload, row.optimizer) in compared
    }
    found = {}
    for method in [each.method for each in CANDIDATES if each.kind == "gradient"]:
        own = [row for row in rows if row.method == method]
        kept = [row for row in own if row.keeps and row.learning_rate == cells[row.workload, row.optimizer]]
        if len(kept) == len(cells):
            workloads = tuple(dict.fromkeys(row.workload for row in own))
            fewer = float(f"{min(row.fewer_bytes for row in own):.3g}")
            found[method] = Recipe(method, fewer, round(max(row.lost for row in own), 2), workloads)
    return found


def fewest(rows: Sequence[Row]) -> Recipe | None:
    return max(suiting(rows).values(), key=lambda recipe: recipe.fewer_bytes, default=None)


def test_the_library_takes_what_was_measured() -> None:
    """Where this fails because more was measured, the table of ``gradwire/engine/recipes.py`` is to be what it says."""
    rows = [row for row in measured.rows(measured.load(measured.MEASURED)) if row.seeds >= measured.SEEDS]
    optimizers = dict.fromkeys(row.optimizer for row in rows)
    found = {optimizer: fewest([row for row in rows if row.optimizer == optimizer]) for optimizer in optimizers}
    assert {name: each for name, each in found.items() if each is not None} == library.RECIPES
    assert fewest(rows) == library.EVERY


def test_without_an_optimizer_it_says_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "EVERY", None)
    with pytest.raises(
        ConfigurationError, match=r"Name yours: 'recipe:sgd' takes .*'recipe:adamw' takes subspace:.*'auto'"
    ):
        library.written_out("recipe")
    monkeypatch.setattr(library, "EVERY", library.RECIPES["sgd"])
    assert library.written_out("recipe") == library.RECIPES["sgd"].method
    with pytest.raises(ConfigurationError, match="did you mean 'adamw'"):
        library.written_out("recipe:adam")
    assert library.written_out("topk:ratio=0.1") == "topk:ratio=0.1"


@pytest.mark.parametrize("name", library.RECIPES)
def test_recipes_can_be_attached(name: str) -> None:
    from gradwire.engine.choices import Choices
    from gradwire.engine.mixture import configure

    plain = configure(library.RECIPES[name].method, {}, Choices())
    assert configure(f"recipe:{name}", {}, Choices()).describe() == plain.describe()
    mixed = configure({"embed*": f"recipe:{name}", "*": "dense"}, {}, Choices())
    assert mixed.rules[0].describe() == plain.describe()
