"""Buckets share the bits that are asked for, so that all are written with the same step."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.codecs.budget import HEARD, SHARE, Budget
from gradwire.engine.choices import Choices
from gradwire.engine.mixture import configure
from gradwire.layout import Float64Array, flat_slots
from gradwire.local import LocalWorld
from gradwire.memory import Store

SHAPES = {f"layer{number}.{name}": shape for number in range(5) for name, shape in (("w", (48, 60)), ("b", (48,)))}
SLOTS = flat_slots(list(SHAPES.items()))
BUCKET_BYTES = 4 * (48 * 60 + 48)
WORKERS = 3

LINES = [
    ("deadzone:bits=0.4", {}),
    ("deadzone:bits=0.4", {"route": "sharded"}),
    ("deadzone:bits=2", {"memory": "none"}),
    ("dithered:bits=1", {}),
    ("subspace:bits=0.6", {}),
    ("subspace:bits=0.6", {"route": "sharded"}),
]


def world(line: str, bucket_bytes: int = BUCKET_BYTES, granularity: str = "bucket", **choices: Any) -> LocalWorld:
    chosen = configure(f"{line},granularity={granularity}", {}, Choices(**choices))
    return LocalWorld(chosen, SLOTS, WORKERS, bucket_bytes=bucket_bytes)


def gradients(step: int) -> list[Tensor]:
    """Of layers whose energy falls by 4 from each to the next."""
    noise = torch.Generator().manual_seed(step)
    size = torch.cat([torch.full((slot.numel,), 2.0 ** -(index // 2)) for index, slot in enumerate(SLOTS)])
    common = torch.randn(len(size), generator=noise)
    return [
        size * (common + torch.randn(len(size), generator=noise)) * torch.randn(len(size), generator=noise)
        for _ in range(WORKERS)
    ]


def trained(found: LocalWorld, steps: range) -> list[Tensor]:
    """Averages, the same bits on all ranks."""
    averages = []
    for step in steps:
        first, *others = given = gradients(step)
        found.average(given)
        assert all(torch.equal(first, each) for each in others)
        averages.append(first)
    return averages


def budgets(found: LocalWorld, rank: int = 0) -> list[Float64Array]:
    return [each.numpy() for each in found.engines[rank].store.stacks("budget")]


def error(found: LocalWorld, steps: range) -> float:
    """Squared, as a share of the mean gradients'."""
    wanted = [torch.stack(gradients(step)).mean(0) for step in steps]
    off = sum(float((ours - mean).square().sum()) for ours, mean in zip(trained(found, steps), wanted, strict=True))
    return off / sum(float(mean.square().sum()) for mean in wanted)


@pytest.mark.parametrize(("line", "choices"), LINES)
def test_all_are_written_with_one_step_in_the_bits_asked_for(line: str, choices: dict[str, Any]) -> None:
    found = world(line, **choices)
    first = found.average(gradients(0)).sent_bytes
    trained(found, range(1, 40))
    last = found.average(gradients(40)).sent_bytes
    assert last == pytest.approx(first, abs=8 * WORKERS * len(budgets(found)))
    shares = [float(rows[0, SHARE]) for rows in budgets(found)]
    assert len(shares) == 5
    assert sum(shares) == pytest.approx(5, rel=1e-9)
    assert shares == sorted(shares)  # the last layers come first, and have the least energy
    steps = [float(rows[0, HEARD]) for rows in budgets(found)]
    assert max(steps[-3:]) < 1.25 * min(steps[-3:])
    assert all((mine == others).all() for mine, others in zip(budgets(found), budgets(found, 1), strict=True))


@pytest.mark.parametrize("bits", [0.4, 2.0])
def test_they_are_as_near_as_one_step_for_the_model(bits: float) -> None:
    """Means of ten steps differ by some percent from draw to draw; equal shares, as of the first step, leave more."""
    line, last = f"deadzone:bits={bits}", range(30, 40)
    shared, whole = world(line, memory="none"), world(line, granularity="model", memory="none")
    equal = [error(world(line, memory="none"), range(step, step + 1)) for step in last]
    trained(shared, range(30))
    assert error(shared, last) == pytest.approx(error(whole, last), rel=0.05)
    assert error(shared, last) < 0.9 * sum(equal) / len(equal)


def test_one_bucket_gets_all_that_is_asked_for() -> None:
    together = world("deadzone:bits=0.4", bucket_bytes=1 << 30)
    whole = world("deadzone:bits=0.4", granularity="model")
    assert all(map(torch.equal, trained(together, range(5)), trained(whole, range(5))))


@pytest.mark.parametrize(("line", "choices"), [LINES[0], LINES[-1]])
def test_a_state_goes_on_with_the_same_bits(line: str, choices: dict[str, Any]) -> None:
    found = world(line, **choices)
    trained(found, range(6))
    resumed = world(line, **choices)
    for engine, saved in zip(resumed.engines, found.engines, strict=True):
        engine.go_on(saved.step, saved.dense_steps, paused=False)
        engine.store.load(saved.store.state(), saved.store.kinds())
    assert all(map(torch.equal, trained(found, range(6, 10)), trained(resumed, range(6, 10))))


def test_new_buckets_begin_with_what_their_parameters_had() -> None:
    found, other = world("deadzone:bits=0.4"), world("deadzone:bits=0.4", bucket_bytes=2 * BUCKET_BYTES)
    trained(found, range(20))
    for engine, saved in zip(other.engines, found.engines, strict=True):
        engine.go_on(saved.step, saved.dense_steps, paused=False)
        engine.store.load(saved.store.state(), saved.store.kinds())
    trained(other, range(20, 21))
    shares = [float(rows[0, SHARE]) for rows in budgets(found)]
    pairs = [(shares[0] + shares[1]) / 2, (shares[2] + shares[3]) / 2, shares[4]]
    assert [float(rows[0, SHARE]) for rows in budgets(other)] == pytest.approx(pairs, rel=0.05)


def test_what_is_not_finite_changes_no_share() -> None:
    found = world("deadzone:bits=0.4")
    trained(found, range(10))
    before = copy.deepcopy(budgets(found))
    spoilt = gradients(10)
    spoilt[1][5] = math.inf
    found.average(spoilt)
    trained(found, range(11, 12))
    (*others, last), (*others_before, last_before) = budgets(found), before
    assert last[0, SHARE] == pytest.approx(last_before[0, SHARE], rel=0.2)
    assert all(torch.isfinite(torch.from_numpy(rows)).all() for rows in others + others_before)


@pytest.mark.parametrize("step", [math.nan, math.inf, -math.inf, -1.0])
def test_what_is_no_step_is_not_heard(step: float) -> None:
    store = Store(torch.device("cpu"))
    one, other = (Budget.of("budget", store, [slot], 0.5, 2) for slot in SLOTS[:2])
    one.heard(1.0)
    before = one.rows.copy(), other.rows.copy()
    other.heard(step)
    assert (one.rows == before[0]).all()
    assert (other.rows == before[1]).all()


def test_who_is_written_first_gains_nothing_by_it() -> None:
    """Of those that were never written nothing is known, not that their steps were zero."""
    store = Store(torch.device("cpu"))
    one, other = (Budget.of("budget", store, [slot], 0.5, 2) for slot in (SLOTS[0], SLOTS[2]))
    one.heard(1.0)
    other.heard(1.0)
    assert one.share(1) == other.share(1) == 1.0


def test_a_bucket_without_gradients_gives_its_bits_away_and_gets_them_back() -> None:
    found = world("deadzone:bits=0.4")
    still = slice(SLOTS[0].offset, SLOTS[1].stop)
    shares = []
    for step in range(40):
        given = gradients(step)
        for each in given:
            each[still] *= step >= 20
        found.average(given)
        shares.append(float(budgets(found)[-1][0, SHARE]))
    assert shares[19] < 0.05
    assert shares[39] > 2


def test_lines_that_ask_for_other_bits_share_nothing() -> None:
    patterns = {"layer0.*": "deadzone:bits=2,granularity=bucket", "*": "deadzone:bits=0.2,granularity=bucket"}
    found = LocalWorld(configure(patterns, {}, Choices()), SLOTS, WORKERS)
    found.average(gradients(0))
    found.average(gradients(1))
    assert [float(rows[0, SHARE]) for rows in budgets(found)] == [1.0, 1.0]
