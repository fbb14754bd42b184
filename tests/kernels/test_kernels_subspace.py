"""Coordinates of rows and what is left of them: Numba against the reference, bit for bit, and the laws of the codec."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gradwire
from gradwire.codecs.lowrank import orthonormal
from gradwire.codecs.quantize import SubspaceDeadZone
from gradwire.codecs.quantize.deadzone import steps_of
from gradwire.engine import Configuration
from gradwire.errors import ConfigurationError
from gradwire.kernels import Compensated, cpu, parts, reference
from gradwire.layout import Block, Granularity, Slot, flat_slots
from gradwire.local import LocalWorld
from gradwire.memory import Feedback, Store
from kernel_inputs import GRADIENTS, same
from matrices import NUMEL, places, taken_apart_and_put_together

CPU = torch.device("cpu")
OFFSET = 3
WHOLE = Granularity("model")


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(1, 20), st.integers(1, 90), st.integers(0, 5), st.booleans(), st.sampled_from(list(GRADIENTS)))
def test_is_the_reference(n: int, m: int, rank: int, remembers: bool, values: str) -> None:
    block = Block.cut([Slot("matrix", (n, m), OFFSET)], WHOLE)
    gradient, basis = GRADIENTS[values], draw(rank, m, seed=1)
    source = Compensated(gradient, draw(len(gradient), seed=2), 0.9, 0.3) if remembers else Compensated(gradient)
    results = []
    for kernels in (cpu, reference):
        coordinates, rest, back = torch.full((rank, n), 7.0), draw(n * m + 5, seed=3), draw(n * m + 5, seed=4)
        combined = torch.full((rank, m), 7.0)
        kernels.split_rows(block, source, basis, coordinates, rest)
        kernels.add_product(block, coordinates, basis, rest, back)
        kernels.combine_rows(block, coordinates, back, combined)
        results.append((coordinates, rest, back, combined))
        assert torch.equal(rest[:OFFSET], draw(n * m + 5, seed=3)[:OFFSET])
        assert torch.equal(back[OFFSET + n * m :], draw(n * m + 5, seed=4)[OFFSET + n * m :])
    for compiled, plain in zip(*results, strict=True):
        assert same(*(torch.where(each.isfinite(), each, torch.nan) for each in (compiled, plain)))


@pytest.mark.parametrize("apart", [0, 5])
@pytest.mark.parametrize("kind", ["normal", "nan", "huge", "signed zeros"])
@pytest.mark.parametrize("remembers", [False, True])
@pytest.mark.parametrize("threads", [1, 3, 8])
def test_matrices_of_all_shapes_at_once(apart: int, kind: str, remembers: bool, threads: int) -> None:
    """However they are cut for threads; nothing between them changes."""
    values = GRADIENTS[kind].repeat(2)[:NUMEL]
    torch.set_num_threads(threads)
    with mock.patch.object(parts, "_least", 8):
        ours = taken_apart_and_put_together(cpu, apart, values, remembers)
    torch.set_num_threads(1)
    for found, known in zip(ours, taken_apart_and_put_together(None, apart, values, remembers), strict=True):
        assert same(found, known)


@pytest.mark.parametrize("wanted", [False, True])
def test_products_are_added_only_if_a_flag_holds(wanted: bool) -> None:
    table, out = places(), draw(NUMEL, seed=2)
    cpu.add_products(table, draw(900, seed=3), draw(2000, seed=4), draw(NUMEL, seed=1), out, torch.tensor(wanted))
    assert torch.equal(out, draw(NUMEL, seed=2)) != wanted


def test_splits_into_what_is_within_and_what_is_not() -> None:
    n, m, rank = 33, 70, 4
    block = Block.cut([Slot("matrix", (n, m), 0)], WHOLE)
    matrix, ((basis,),) = draw(n * m, seed=5), orthonormal([draw(1, rank, m, seed=6)])
    coordinates, rest, back = torch.empty(rank, n), torch.empty(n * m), torch.empty(n * m)
    cpu.split_rows(block, Compensated(matrix), basis, coordinates, rest)
    torch.testing.assert_close(coordinates, basis @ matrix.view(n, m).T)
    torch.testing.assert_close(rest.view(n, m) @ basis.T, torch.zeros(n, rank), rtol=0, atol=1e-5)
    cpu.add_product(block, coordinates, basis, rest, back)
    torch.testing.assert_close(back, matrix)
    cpu.add_product(block, coordinates, basis, rest, rest)
    assert torch.equal(rest, back)


def nearly_low_rank(step: int, worker: int) -> Tensor:
    """Two directions that stay, weights that do not, and noise of a fifth of their energy."""
    rows, columns = draw(2, 96, seed=100 * step + worker), draw(2, 128, seed=7)
    return (rows.T @ columns).flatten() + 0.6 * draw(96 * 128, seed=100 * step + worker + 50)


def error(method: str, bits: float, route: str, steps: int = 6) -> float:
    """What the last of some steps leaves without a memory, as a share of the mean's square."""
    choice = Configuration.make(method, {"bits": bits}, memory="none", route=route)
    world = LocalWorld(choice, flat_slots([("w", (96, 128))]), 2)
    for step in range(steps):
        gradients = [nearly_low_rank(step, worker) for worker in range(2)]
        mean = (gradients[0] + gradients[1]) / 2
        world.average(gradients)
    return float((gradients[0] - mean).square().sum() / mean.square().sum())


@pytest.mark.parametrize("route", ["gather", "sharded"])
@pytest.mark.parametrize("bits", [0.1, 0.5, 2.0])
def test_finds_directions_that_stay(bits: float, route: str) -> None:
    """By the theory of rates 10 log10 of the noise's share is what many bits gain, 8 dB; 2 dB are asked for."""
    assert error("subspace", bits, route) < 0.63 * error("deadzone", bits, route)


@pytest.mark.parametrize("owners", [1, 3, 7])
def test_owners_have_whole_rows(owners: int) -> None:
    """But of matrices of fewer rows than there are owners."""
    slots = flat_slots([("a", (41, 6, 10)), ("few", (3, 80)), ("vector", (70,))])
    shards = Block.cut(slots, Configuration.make("subspace", {}, route="sharded").granularity).shards(owners)
    covered = torch.zeros(slots[-1].stop, dtype=torch.int64)
    for shard in shards:
        for start, length, _ in shard.runs.tolist():
            covered[start : start + length] += 1
        for index, (rows, m) in enumerate([(41, 60), (3, 80)]):
            own = shard.slot_of_run == index
            assert owners > rows or not (shard.origins[own] % m).any()
            assert owners > rows or not (shard.runs[own, 1] % m).any()
    assert (covered == 1).all()


def test_owners_write_with_the_same_directions() -> None:
    with pytest.raises(ConfigurationError, match="or does so by itself alone"):
        Configuration.make("subspace", {}, route="sharded", owner="qsgd:8")
    Configuration.make("subspace", {}, owner="qsgd:8")


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("bits", [0.005, 0.1, 1.0, 8.0])
def test_leaves_no_more_than_there_was(bits: float, scale: float) -> None:
    """Whatever the directions are, for matrices of any kind: also where coordinates fill the whole room."""
    slots = flat_slots([("a", (40, 60)), ("vector", (70,)), ("b", (300, 8))])
    numel, store = slots[-1].stop, Store(torch.device("cpu"))
    codec = SubspaceDeadZone(bits, 3).installed(store, slots, numel)
    block = Block.cut(slots, WHOLE)
    for seed in range(8):
        for name, m in (("a", 60), ("b", 8)):
            ((basis,),) = orthonormal([draw(1, 3, m, seed=seed)])
            kept = store.get("basis", name)
            assert kept is not None
            kept.copy_(basis)
        within = (draw(40, 3, seed=seed) @ orthonormal([draw(1, 3, 60, seed=seed)])[0][0]).flatten()
        gradient = scale * draw(numel, seed=seed) ** 3
        gradient[: 40 * 60] += 30 * scale * within
        residual, payload = torch.zeros(numel), torch.empty(codec.payload_bytes(block), dtype=torch.uint8)
        codec.encode(block, gradient, Feedback(residual), payload, 0)
        before, after = (each.double().square().sum() for each in (gradient, residual))
        assert after <= before * (1 + 1e-5)
        out = torch.empty(numel)
        codec.decode(block, payload[None], out, 1.0)
        size = float(gradient.abs().max())
        torch.testing.assert_close(out + residual, gradient, rtol=0, atol=1e-5 * size)


@pytest.mark.parametrize("owners", [1, 3, 7, 48])
@pytest.mark.parametrize("bits", [0.03, 1.0])
def test_what_is_written_for_all_owners_is_what_is_written_for_each(owners: int, bits: float) -> None:
    """Bit for bit, and so are residuals and averages, also where owners have parts of rows, or some have no room."""
    slots = flat_slots([("a", (40, 60)), ("vector", (70,)), ("b", (48, 30)), ("few", (5, 96))])
    block, numel = Block.cut(slots, Granularity("model", rows=True)), slots[-1].stop
    codecs = [SubspaceDeadZone(bits, 3).installed(Store(torch.device("cpu")), slots, numel) for _ in range(2)]
    for codec in codecs:
        for seed, directions in enumerate(codec.directions.values()):
            if len(directions.basis):
                directions.basis.copy_(orthonormal([draw(1, *directions.basis.shape, seed=seed)])[0][0])
    shards = [shard for shard in block.shards(owners) if len(shard.runs)]
    together, apart = (Feedback(torch.zeros(numel)) for _ in range(2))
    payloads = torch.full((len(shards), max(map(codecs[0].payload_bytes, shards))), 255, dtype=torch.uint8)
    for step in range(3):
        gradient = draw(numel, seed=step) ** 3
        if step == 1:
            gradient[77] = torch.inf
        codecs[0].encode_each(shards, gradient, together, payloads, 0)
        for shard, written in zip(shards, payloads, strict=True):
            payload = torch.empty(codecs[1].payload_bytes(shard), dtype=torch.uint8)
            codecs[1].encode(shard, gradient, apart, payload, 0)
            assert torch.equal(written[: len(payload)], payload)
            assert not written[len(payload) :].any()
        assert torch.equal(together.residual, apart.residual)
        averages = torch.empty(2, numel)
        codecs[0].decode_each(shards, payloads, averages[0])
        for shard, written in zip(shards, payloads, strict=True):
            codecs[1]._sum(shard, written[None, : codecs[1].payload_bytes(shard)], averages[1], 1.0)
        assert torch.equal(averages[0].nan_to_num(7.0), averages[1].nan_to_num(7.0))
        codecs[1]._learn(averages[1])
        for one, other in zip(codecs[0].directions.values(), codecs[1].directions.values(), strict=True):
            assert torch.equal(one.basis, other.basis)


@pytest.mark.parametrize("owners", [2, 5])
def test_the_host_waits_for_the_samples_of_all_owners_at_once(owners: int) -> None:
    """For those of all their values, then for those of all that is left of them, which alone must fit."""
    slots = flat_slots([("a", (40, 60)), ("b", (48, 30))])
    codec = SubspaceDeadZone(0.8, 3).installed(Store(torch.device("cpu")), slots, slots[-1].stop)
    shards = list(Block.cut(slots, Granularity("model", rows=True)).shards(owners))
    payloads = torch.empty(owners, max(map(codec.payload_bytes, shards)), dtype=torch.uint8)
    with mock.patch("gradwire.codecs.quantize.subspace.steps_of", side_effect=steps_of) as asked:
        codec.encode_each(shards, draw(slots[-1].stop, seed=1), Feedback(torch.zeros(slots[-1].stop)), payloads, 0)
    assert [len(call.args[0]) for call in asked.mock_calls] == [owners, owners]
    first, then = ([(each.exactly, each.near is None) for each in call.args[0]] for call in asked.mock_calls)
    assert (set(first), set(then)) == ({(False, True)}, {(True, False)})


def test_directions_stay_when_there_are_more_or_fewer() -> None:
    """Those of several matrices lie in one buffer, and are kept by their names nevertheless."""
    slots, store = flat_slots([("a", (40, 60)), ("vector", (70,)), ("b", (48, 35)), ("c", (40, 60))]), Store(CPU)
    for seed, directions in enumerate(SubspaceDeadZone(0.1, 3).installed(store, slots, 9000).directions.values()):
        directions.basis.copy_(draw(*directions.basis.shape, seed=seed))
    before = store.state()["basis"]
    assert {name: tuple(basis.shape) for name, basis in before.items()} == {"a": (3, 60), "b": (3, 35), "c": (3, 60)}
    more = SubspaceDeadZone(0.1, 4).installed(store, slots[::-1], 9000).directions
    for name, basis in before.items():
        assert torch.equal(more[name].basis[:3], basis)
        assert not more[name].basis[3:].any()
    fewer = SubspaceDeadZone(0.1, 2).installed(store, slots, 9000).directions
    for name, basis in before.items():
        assert torch.equal(fewer[name].basis, basis[:2])


def test_bytes_are_those_of_the_dead_zone() -> None:
    gradient = draw(200, 300, seed=8)
    for bits in (0.02, 0.5, 4.0):
        sizes = [gradwire.roundtrip(gradient, name, bits=bits).wire_bytes for name in ("subspace", "deadzone")]
        assert abs(sizes[0] - sizes[1]) <= 4 * (1 + bits * 1000 * 4 / 8192)


@pytest.mark.parametrize("bits", [0.02, 0.1, 1.0])
def test_payloads_are_full_to_a_twentieth(bits: float) -> None:
    """Also where a few of many coordinates take a good part of the room, of which a sample would say little."""
    n, m = 3000, 400
    slots, store = flat_slots([("w", (n, m))]), Store(torch.device("cpu"))
    codec, block = SubspaceDeadZone(bits, 4).installed(store, slots, n * m), Block.cut(slots, WHOLE)
    ((basis,),) = orthonormal([draw(1, 4, m, seed=9)])
    kept = store.get("basis", "w")
    assert kept is not None
    kept.copy_(basis)
    for seed in range(4):
        weights = torch.where(draw(n, 1, seed=seed) > 1.5, 100 * draw(n, 4, seed=seed + 4), 0.0)
        gradient = draw(n * m, seed=seed) * draw(n * m, seed=seed + 8) + (weights @ basis).flatten()
        payload = torch.empty(codec.payload_bytes(block), dtype=torch.uint8)
        codec.encode(block, gradient, Feedback(None), payload, 0)
        assert int(payload.nonzero()[-1]) + 1 >= 0.95 * len(payload)
        assert codec.homes[block].coordinates.abs().max() < payload[:4].view(torch.float32), "coordinates come first"


@pytest.mark.parametrize("bits", [0.3, 0.8, 4.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_last_values_have_room(bits: float, seed: int) -> None:
    """Where the step is chosen by all values no value is off by more than it, also the loudest ones, which come last.

    Rows of an embedding are mostly zeros, and the gradient of the last bias is the largest: without the room for it all
    of that waited for a later step.
    """
    shapes = [("users", (400, 16)), ("items", (301, 16)), ("hidden", (64, 32)), ("last", (1, 64)), ("bias", (1,))]
    slots, store = flat_slots(shapes), Store(CPU)
    gradient = draw(slots[-1].stop, seed=seed)
    for slot, seen in zip(slots[:2], (0.25, 0.5), strict=True):
        rows = gradient[slot.offset : slot.stop].view(slot.shape)
        rows *= torch.rand(len(rows), 1, generator=torch.Generator().manual_seed(seed)) < seen
    gradient[slots[-2].offset :] *= 100
    gradient[-1] = 2000.0
    codec, block = SubspaceDeadZone(bits, 4).installed(store, slots, len(gradient)), Block.cut(slots, WHOLE)
    for _ in range(3):  # directions are known from the second on
        residual, decoded = torch.zeros_like(gradient), torch.empty_like(gradient)
        payload = torch.empty(codec.payload_bytes(block), dtype=torch.uint8)
        codec.encode(block, gradient, Feedback(residual), payload, 0)
        codec.decode(block, payload[None], decoded, 1.0)
        assert torch.allclose(residual + decoded, gradient, atol=1e-3)
        assert residual.abs().max() <= payload[:8].view(torch.float32).max() < 2000.0


@pytest.mark.parametrize("rank", [0, 65, 1.5, "4"])
def test_rank_is_checked(rank: object) -> None:
    with pytest.raises(ConfigurationError, match="choose 1 to 64 directions, usually 4"):
        Configuration.make("subspace", {"rank": rank})
