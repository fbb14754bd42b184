"""Constant gradients whose kind methods find hard: over many steps every coordinate gets what it is owed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.engine.configuration import Configuration
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld
from gradwire.policy import DensePolicy

EVERYTHING = DensePolicy(below=0, vectors=False)
HALVES = [(slice(None, 20), slice(None, 12)), (slice(20, None), slice(12, None))]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def applied(method: str, options: dict[str, Any], steps: list[list[Tensor]], skipped: int, **choices: Any) -> Tensor:
    """The mean over steps of what was applied to one tensor, the first steps left out."""
    slots = flat_slots([("tensor", tuple(steps[0][0].shape))])
    configuration = Configuration.make(method, options, **choices, dense=EVERYTHING)
    world, total = LocalWorld(configuration, slots, len(steps[0])), torch.zeros_like(steps[0][0])
    for step, gradients in enumerate(steps):
        given = [gradient.flatten().clone() for gradient in gradients]
        world.average(given)
        total += given[0].view_as(total) if step >= skipped else 0
    return total / (len(steps) - skipped)


@pytest.mark.parametrize("method", ["topk", "gtopk", "oktopk", "scalecom"])
@pytest.mark.parametrize("workers", [2, 3])
def test_large_values_that_cancel_keep_no_others_back(method: str, workers: int) -> None:
    gradients = [0.2 * draw(1000) for _ in range(workers)]
    for gradient, factor in zip(gradients, (1.0, -1.0, 0.0), strict=False):
        gradient[:100] = factor * (1 + draw(100, seed=1))
    found = applied(method, {"ratio": 0.05}, [gradients] * 300, 100)
    rates = found[100:] / gradients[0][100:]
    assert 0.5 < float(rates.min()) <= float(rates.max()) < 1.8
    assert (found[:100] == 0).all()


@pytest.mark.parametrize("method", ["powersgd", "acpsgd"])
@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("kind", ["after a step of zeros", "after others"])
def test_a_matrix_wakes_up_below_and_beside_zeros(method: str, rank: int, kind: str) -> None:
    """As that of an embedding, whose first rows stand for tokens that never come."""
    matrix = draw(40, 24) - 1
    matrix[:4], matrix[:, :4] = 0, 0
    before = torch.zeros_like(matrix)
    if kind == "after others":
        before[4:20, 4:12] = matrix[4:20, 4:12]
        matrix[:20], matrix[:, :12] = 0, 0
    found = applied(method, {"rank": rank}, [[before] * 2] * 4 + [[matrix] * 2] * 200, 104)
    assert float((found - matrix).norm()) < 0.25 * float(matrix.norm())


@pytest.mark.parametrize("route", ["gather", "sharded"])
@pytest.mark.parametrize(("numel", "ratio", "rare"), [(200, 0.1, 3), (8, 0.1, 2), (1000, 0.01, 40)])
def test_the_few_of_a_rare_sign_are_sent(route: str, numel: int, ratio: float, rare: int) -> None:
    gradient = draw(numel)
    gradient[-rare:] *= -1
    found = applied("dryden", {"ratio": ratio}, [[gradient] * 2] * 400, 100, route=route)
    rates = found / gradient
    assert 0.4 < float(rates.min()) <= float(rates.max()) < 2.5


@pytest.mark.parametrize("granularity", ["layer", "block:64"])
@pytest.mark.parametrize("route", ["gather", "sharded"])
def test_segments_of_values_that_are_alike_get_their_turn(granularity: str, route: str) -> None:
    """Relative to its own mean magnitude a value that is alone is no larger for having waited."""
    slots = flat_slots([("matrix", (64, 64)), ("scale", ()), ("pair", (2,)), ("alike", (32,))])
    configuration = Configuration.make("deadzone", {"bits": 0.5}, granularity, route, dense=EVERYTHING)
    gradient = draw(slots[-1].stop) - 1
    gradient[slots[3].offset : slots[3].stop] = 0.5
    world, total = LocalWorld(configuration, slots, 2), torch.zeros_like(gradient)
    for step in range(400):
        given = [gradient.clone(), gradient.clone()]
        world.average(given)
        total += given[0] / 300 if step >= 100 else 0
    rates = [total[slot.offset : slot.stop].norm() / gradient[slot.offset : slot.stop].norm() for slot in slots]
    assert 0.5 < float(min(rates)) <= float(max(rates)) < 1.5


@pytest.mark.parametrize("room", [1, 2, 6])
def test_values_that_are_alike_take_turns_in_a_small_room(room: int) -> None:
    gradient = 0.01 * draw(1003).sign() * draw(1003, seed=2).sub(1).sign()
    found = applied("inceptionn", {"room": room}, [[gradient] * 2] * 200, 40, memory="residual")
    torch.testing.assert_close(found, gradient, rtol=0.2, atol=0)


@pytest.mark.parametrize(("method", "options"), [("powersgd", {"rank": 1}), ("powersgd", {"rank": 4}), ("dion", {})])
def test_a_matrix_wakes_up_where_it_shares_no_row_or_column_with_what_was_there(
    method: str, options: dict[str, Any]
) -> None:
    """As that of two groups of units with nothing between them, of which one begins later."""
    before, after = torch.zeros(40, 24), draw(40, 24) - 1
    before[:20, :12] = after[:20, :12]
    after[:20, 12:], after[20:, :12] = 0, 0
    found = applied(method, options, [[before] * 2] * 20 + [[after] * 2] * 200, 120)
    shares = [found[rows, columns].norm() / after[rows, columns].norm() for rows, columns in HALVES]
    if method == "dion":  # whose averages have a length of their own
        assert float(min(shares)) > 0.25 * float(max(shares))
    else:
        assert float((found - after).norm()) < 0.25 * float(after.norm())
