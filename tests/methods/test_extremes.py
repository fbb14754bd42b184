"""Gradients that are finite but extreme: averages stay finite and come back, and memories hold numbers only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache

import pytest
import torch

from catalogue import Case, cases
from gradwire.codecs.lowrank import orthonormal, scaled_rows
from gradwire.engine.configuration import Configuration
from gradwire.engine.guards.rollback import Rollback
from gradwire.layout import ALIGNMENT, flat_slots, shard_bounds
from gradwire.local.world import LocalWorld
from gradwire.memory import MaskedMomentum
from gradwire.policy import DensePolicy

SLOTS = flat_slots([("linear", (40, 67)), ("conv", (8, 8, 3, 3)), ("odd", (1031,))])
NUMEL = SLOTS[-1].stop
WORKERS = 2
ROW = slice(67, 134)
SMALLEST = 2.0**-149


def distinct(chosen: Iterable[Case]) -> list[Case]:
    return list({str(case): case for case in chosen}.values())


# fp16 ends at 65504, beyond which a value counts as not finite; so does a sum of them.
NARROW = [case for case in cases() if case.method == "fp16" or case.options.get("values") == "fp16"]
WIDE = [case for case in cases() if case not in NARROW]
LOW_RANK = [case for case in WIDE if case.method in ("powersgd", "acpsgd", "atomo", "gradiveq")]
NEITHER_ALONE = [case for case in WIDE if case.method in ("dion", "gtopk")]
DGC = [case for case in WIDE if case.method == "dgc"]
EACH = list({case.method: case for case in reversed(WIDE)}.values())
SOME = distinct([*LOW_RANK, *DGC, *WIDE[::8]])

Extreme = Callable[[torch.Tensor, int, int], torch.Tensor]
"""From an ordinary gradient, the step and the rank to another one."""


@cache
def drawn(step: int, rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * step + rank)) * 1e-3


def ordinary(step: int, rank: int) -> torch.Tensor:
    return drawn(step, rank).clone()


def row(gradient: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    """One row on one worker."""
    if (step, rank) == (1, 0):
        gradient[ROW] = 1e22
    return gradient


def values(gradient: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    """Two values on one worker."""
    if (step, rank) == (1, 1):
        gradient[100], gradient[3000] = 1e30, -1e30
    return gradient


def whole(gradient: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    """All values on all workers."""
    return gradient * 1e32 if step == 1 else gradient


def mixed(gradient: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    """Magnitudes from 1e-38 to 1e30, in one step."""
    if step != 1:
        return gradient
    places = torch.randperm(NUMEL, generator=torch.Generator().manual_seed(rank))
    return gradient.sign() * 10 ** torch.linspace(-38, 30, NUMEL)[places]


SPIKES = (row, values, whole, mixed)


def attached(case: Case) -> LocalWorld:
    dense = DensePolicy(below=0, vectors=False)
    arguments = {"granularity": case.granularity, "route": case.route, "memory": case.memory}
    return LocalWorld(Configuration.make(case.method, {**case.options}, **arguments, dense=dense), SLOTS, WORKERS)


def with_a_rollback(world: LocalWorld) -> LocalWorld:
    for engine in world.engines:
        engine.guards.append(Rollback(engine, {slot.name: torch.float32 for slot in SLOTS}))
    return world


def same(kept: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> bool:
    return kept.keys() == before.keys() and all(torch.equal(tensor, before[name]) for name, tensor in kept.items())


def averages(world: LocalWorld, extreme: Extreme, steps: int) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """The mean of what each step puts in, in float64, and what each rank gets."""
    for step in range(steps):
        gradients = [extreme(ordinary(step, rank), step, rank) for rank in range(WORKERS)]
        mean = torch.stack(gradients).double().mean(0)
        world.average(gradients)
        yield mean, gradients


USUAL: dict[str, list[float]] = {}


def usual(case: Case) -> list[float]:
    """The norms of rank 0's averages in six steps of ordinary gradients, kept for all tests."""
    if str(case) not in USUAL:
        found = averages(attached(case), lambda gradient, step, rank: gradient, 6)
        USUAL[str(case)] = [float(each[0].norm()) for _, each in found]
    return USUAL[str(case)]


def remembered(world: LocalWorld) -> Iterator[tuple[str, torch.Tensor]]:
    for engine in world.engines:
        for field, kept in engine.store.state().items():
            yield from ((f"{field} of {name} on {engine.rank}", tensor) for name, tensor in kept.items())


def owed(world: LocalWorld, case: Case) -> torch.Tensor:
    """The mean of what workers did not send, and what owners did not."""
    total = torch.zeros(NUMEL, dtype=torch.float64)
    for rank, engine in enumerate(world.engines):
        for slot in SLOTS:
            if (kept := engine.store.get("residual", slot.name)) is not None:
                total[slot.offset : slot.stop] += kept.flatten().double() / WORKERS
            if (kept := engine.store.get("owner_residual", slot.name)) is not None and case.route == "gather":
                total[slot.offset : slot.stop] += kept.flatten().double() / WORKERS
            elif kept is not None:
                unit = engine.configuration.granularity.unit(slot.shape) or ALIGNMENT
                low, high = shard_bounds(slot.numel, rank, WORKERS, unit)
                total[slot.offset + low : slot.offset + high] += kept.flatten()[: high - low].double()
    return total


@pytest.mark.parametrize("first", range(len(SPIKES)), ids=[spike.__name__ for spike in SPIKES])
def test_a_finite_spike_gives_finite_averages_and_passes(first: int) -> None:
    """Every attachment takes one of the spikes, those of low rank all of them.

    All averages are finite, that of the spike, too. With error feedback averages and residuals add up to what was put
    in, but for float32's rounding of the largest value so far, a few times a step. Without a memory the averages four
    steps later are as large as they would be without the spike, within a factor of three.
    """
    for case in distinct([*LOW_RANK, *WIDE[first :: len(SPIKES)]]):
        world, spike = attached(case), SPIKES[first]
        put, applied, largest = torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double(), 0.0
        for mean, each in averages(world, spike, 6):
            assert all(bool(average.isfinite().all()) for average in each), str(case)
            assert all(torch.equal(each[0], other) for other in each), str(case)
            put += mean
            applied += each[0].double()
            largest = max(largest, WORKERS * float(mean.abs().max()), float(each[0].abs().max()))
            if case.memory == "residual":
                off = float((applied + owed(world, case) - put).abs().max())
                rounding = 2.0**-8 if case.method == "bf16" else 2.0**-21
                assert off <= rounding * largest, (str(case), off, largest)
        if case.memory == "none" and case.method != "demo":  # which has a momentum of its own
            assert each[0].norm() <= 3 * usual(case)[5], str(case)


@pytest.mark.parametrize("spike", [row, values])
def test_what_a_narrow_wire_cannot_hold_is_seen_and_then_forgotten(spike: Extreme) -> None:
    """Averages are not finite in the step of the spike and perhaps the next, in which an owner passes on what is left.

    A momentum keeps the spike as long as its decay says, and DeMo has two of a chunk's coefficients forgotten a step;
    both are left out.
    """
    for case in NARROW:
        if case.memory in ("none", "residual") and case.method != "demo":
            finite = []
            for _, each in averages(attached(case), spike, 6):
                finite.append([bool(average.isfinite().all()) for average in each])
            assert finite[0] == [True, True], str(case)
            assert finite[1] == [False, False], str(case)
            assert finite[3:] == [[True, True]] * 3, (str(case), finite)


def near_the_largest(gradient: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    """Of either sign, then of one, then ordinary: more than float32 holds once it is added up."""
    if step == 0:
        return gradient.sign() * 3e38
    return torch.full_like(gradient, 3.3e38) if step == 1 else gradient


def as_large_as_halves(gradient: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    return gradient.sign() * 1e38 if step < 2 else gradient


def spread(gradient: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    """Some near the largest among others of a few per cent of it, always in the same places."""
    return torch.where(ordinary(0, 0).abs() > 1.5e-3, 3.2e38, 1e37)


@pytest.mark.parametrize("extreme", [near_the_largest, as_large_as_halves, spread])
def test_an_overflow_is_seen_by_all_and_remembered_by_none(extreme: Extreme) -> None:
    for case in SOME:
        world = attached(case)
        for _, each in averages(world, extreme, 6):
            finite = [bool(average.isfinite().all()) for average in each]
            assert all(finite) or not any(finite), str(case)
            assert not finite[0] or torch.equal(each[0], each[1]), str(case)
            for name, tensor in remembered(world):
                assert tensor.isfinite().all(), (str(case), name)


@pytest.mark.parametrize("extreme", [near_the_largest, as_large_as_halves, spread])
def test_with_a_rollback_an_overflow_leaves_nothing(extreme: Extreme) -> None:
    """Where the average is not finite, all that is kept is what it was; and averages of 1e38 pass at once.

    But for a momentum that adds up, which without clipping goes beyond float32 again from where it was, as a residual
    of larger ones may do: acpsgd's is, with factors in bfloat16, from 3e38 on.
    """
    for case in SOME:
        world = with_a_rollback(attached(case))
        before = dict(remembered(world))
        for step, (_, each) in enumerate(averages(world, extreme, 6)):
            finite = [bool(average.isfinite().all()) for average in each]
            kept = dict(remembered(world))
            assert finite[0] == finite[1], str(case)
            assert finite[0] or same(kept, before), (str(case), step)
            if step > 1 and extreme is as_large_as_halves and case.memory in ("none", "residual"):
                assert finite[0], (str(case), step)
            before = kept


def near_the_largest_once(gradient: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    """Signs of ordinary values, all of one size, in one step."""
    return gradient.sign() * 1e38 if step == 1 else gradient


def one_row_near_the_largest(gradient: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    if (step, rank) == (1, 0):
        gradient[ROW] = 2e38
    return gradient


def two_values_near_the_largest(gradient: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    if step == 1:
        gradient[100], gradient[3000] = 3.3e38, -3.3e38
    return gradient


LARGEST = (near_the_largest_once, one_row_near_the_largest, two_values_near_the_largest)


@pytest.mark.parametrize("first", range(len(LARGEST)), ids=[spike.__name__ for spike in LARGEST])
def test_a_spike_near_the_largest_passes(first: int) -> None:
    """Whatever it leaves in a residual averages are finite again within three steps, on both workers.

    A momentum keeps it as long as its decay says, and what adds momenta up is beyond float32 with the second.
    """
    for case in distinct([*LOW_RANK, *NEITHER_ALONE, *WIDE[first :: len(LARGEST)]]):
        if case.memory not in ("none", "residual"):
            continue
        for step, (_, each) in enumerate(averages(attached(case), LARGEST[first], 9)):
            assert 1 <= step <= 3 or all(bool(average.isfinite().all()) for average in each), (str(case), step)


@pytest.mark.parametrize("spike", LARGEST, ids=[spike.__name__ for spike in LARGEST])
def test_a_momentum_that_adds_up_is_finite_where_gradients_are_clipped(spike: Extreme) -> None:
    """Whatever the clip: each parameter's gradient then counts for as much, and no sum of them is beyond float32."""
    memory = MaskedMomentum(clip=1e30)
    for case in (Case(each.method, each.options, each.granularity, each.route, memory) for each in DGC):
        for world in (attached(case), with_a_rollback(attached(case))):
            for step, (_, each) in enumerate(averages(world, spike, 6)):
                assert all(bool(average.isfinite().all()) for average in each), (str(case), step)


@pytest.mark.parametrize("spike", LARGEST, ids=[spike.__name__ for spike in LARGEST])
def test_a_momentum_of_atoms_is_finite_as_soon_as_it_fits_float32(spike: Extreme) -> None:
    """A tenth of the spike does, whatever atoms are divided by, and the averages are of its size while it decays."""
    for case in (case for case in WIDE if case.method == "atomo" and case.memory == "momentum"):
        for step, (_, each) in enumerate(averages(attached(case), spike, 6)):
            assert all(bool(average.isfinite().all()) for average in each), (str(case), step)
            assert step < 1 or float(each[0].abs().max()) > 1e36


def denormal(gradient: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    return gradient * 1e-37 if step < 3 else gradient


def smallest(gradient: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    return gradient.sign() * SMALLEST if step < 3 else gradient


@pytest.mark.parametrize("extreme", [denormal, smallest])
def test_denormal_gradients_are_averaged_and_what_follows_is_ordinary(extreme: Extreme) -> None:
    """The first attachment of every method, all of those of low rank, and an eighth of the others."""
    for case in distinct([*LOW_RANK, *EACH, *WIDE[::8]]):
        for step, (_, each) in enumerate(averages(attached(case), extreme, 5)):
            if step < 3:
                continue
            assert all(bool(average.isfinite().all()) for average in each), str(case)
            assert all(torch.equal(each[0], average) for average in each), str(case)
            if case.memory == "none":
                assert each[0].norm() <= 3 * usual(case)[step], str(case)


@pytest.mark.parametrize("method", ["powersgd", "acpsgd"])
def test_low_rank_finds_a_matrix_of_low_rank_however_small_or_large(method: str) -> None:
    """Within eight steps without a memory: the factors that are kept lose no direction."""
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(40, 2, generator=generator) @ torch.randn(2, 67, generator=generator)
    slots = flat_slots([("linear", (40, 67))])
    for scale in (1e-40, 1e-30, 1.0, 1e30):
        case = Configuration.make(method, {"rank": 2}, memory="none", dense=DensePolicy(below=0, vectors=False))
        world = LocalWorld(case, slots, 1)
        for _ in range(8):
            average = (matrix * scale).flatten()
            world.average([average])
        torch.testing.assert_close(average.double() / scale, matrix.flatten().double(), rtol=1e-3, atol=1e-3)


def test_scaling_is_by_powers_of_two_and_changes_no_direction() -> None:
    rows = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(2))
    for scale in (2.0**-100, 1.0, 2.0**60, 2.0**120):
        scaled = scaled_rows(rows * scale)
        assert torch.equal(scaled, scaled_rows(rows))
        assert ((scaled.abs().sum(2) >= 0.5 - 1e-6) & (scaled.abs().sum(2) <= 1 + 1e-6)).all()
        assert torch.equal(orthonormal([rows * scale])[0], orthonormal([rows])[0])
    assert torch.equal(scaled_rows(torch.zeros(1, 2, 5)), torch.zeros(1, 2, 5))
    assert scaled_rows(torch.full((1, 2, 5), torch.finfo(torch.float32).max)).isfinite().all()
    assert scaled_rows(torch.full((1, 2, 5), torch.nan)).isnan().all()
