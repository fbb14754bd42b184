"""Dead zones in Triton have the bits of the reference: steps, payloads, averages, whatever the bytes; and subspaces."""

from __future__ import annotations

import random

import pytest
import torch
from interpreted import BLOCKS, by_the_gpu, of_all_kinds  # noqa: F401

from gradwire.kernels import Compensated, gpu, reference
from gradwire.kernels.gpu import deadzone_read
from gradwire.kernels.reference import deadzone_payload_bytes, deadzone_room
from gradwire.kernels.reference.deadzone import HEAD
from gradwire.layout import Block, Granularity, flat_slots
from guarded import copied, guarded, release
from kernel_inputs import GRADIENTS, KEY, block_of, normal, same

LONG = block_of((4129, 3, 700), "model")
POINTS = (100, 131, 128)


def relative(block: Block, values: torch.Tensor, by: float) -> torch.Tensor:
    return reference.deadzone_scales(block, Compensated(values)) * by


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("remembers", [False, True])
def test_scales_and_what_is_left_in_the_residual(name: str, remembers: bool) -> None:
    block, results = BLOCKS[name], []
    for kernels in (gpu, reference):
        residual = copied(normal(5)) if remembers else None
        scales = kernels.deadzone_scales(block, Compensated(copied(of_all_kinds(block)), residual, 0.9, 0.3))
        results.append((scales, residual))
    assert same(results[0][0], results[1][0])
    assert not remembers or same(results[0][1], results[1][1])


def test_a_sample_of_another_turn_is_of_other_values() -> None:
    block, scales = Block.cut(flat_slots([("w", (140_000,))]), Granularity("model")), torch.ones(1)
    values, room = torch.randn(block.positions, generator=torch.Generator().manual_seed(1)), 140_000
    for turn in (0, 3, 0):
        assert same(*(each.deadzone_sample(block, values, scales, room, turn) for each in (gpu, reference)))


@pytest.mark.parametrize("name", BLOCKS)
def test_samples_and_what_is_rounded_by_chance(name: str) -> None:
    block, values = BLOCKS[name], of_all_kinds(BLOCKS[name])
    scales = reference.deadzone_scales(block, Compensated(values))
    assert same(*(each.deadzone_sample(block, values, scales, 1000) for each in (gpu, reference)))
    rounded = []
    for kernels in (gpu, reference):
        rounded.append(copied(normal(9)))
        kernels.deadzone_dither(block, values, scales * 0.3, KEY, rounded[-1])
    assert same(*rounded)


def check_written_and_read(block: Block, values: torch.Tensor, steps: torch.Tensor, tile: int, bits: float) -> None:
    size, results = deadzone_payload_bytes(block, tile, bits), []
    for kernels in (gpu, reference):
        payloads, left, out = torch.full((2, size), 0xFF, dtype=torch.uint8), copied(values), copied(normal(8))
        fits = kernels.deadzone_encode(block, left, True, steps, POINTS, tile, payloads[0])
        kernels.deadzone_encode(block, copied(values), False, steps * 2.5, POINTS, tile, payloads[1])
        kernels.deadzone_decode(block, payloads, tile, out, 0.5)
        results.append((payloads, left, out, torch.as_tensor(fits)))
    for ours, theirs in zip(*results, strict=True):
        assert same(ours, theirs)


@pytest.mark.parametrize(("tile", "bits"), [(20, 4.0), (32, 0.7), (16, 72.0)])
@pytest.mark.parametrize("name", BLOCKS)
def test_written_and_read(name: str, tile: int, bits: float) -> None:
    """Also where there is no room for all."""
    block, values = BLOCKS[name], of_all_kinds(BLOCKS[name])
    check_written_and_read(block, values, relative(block, values, 0.4), tile, bits)


def test_nan_of_any_bits_is_written_as_one() -> None:
    """A GPU's own differ from the CPU's."""
    block, values = BLOCKS["layers of any kind"], of_all_kinds(BLOCKS["layers of any kind"])
    steps = relative(block, values, 0.4)
    steps[steps.isnan()] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    check_written_and_read(block, values, steps, 20, 4.0)


def test_values_of_many_thousand_steps() -> None:
    block, values = BLOCKS["layers of any kind"], of_all_kinds(BLOCKS["layers of any kind"])
    check_written_and_read(block, values, relative(block, values, 1e-4), 50, 12.0)


@pytest.mark.parametrize("by", [0.02, 2.0])
@pytest.mark.parametrize("lanes", [8, 32])
def test_runs_of_many_pieces_and_tiles(by: float, lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadzone_read, "LANES", ((0, lanes),))
    values = GRADIENTS["normal"]
    check_written_and_read(LONG, values, relative(LONG, values, by), 64, 3.0)


@pytest.mark.parametrize("tile", [20, 64])
def test_any_bytes(tile: int) -> None:
    draw, block = random.Random(tile), block_of((33, 1, 40), "layer")
    size = deadzone_payload_bytes(block, tile, 2.0)
    head = size - deadzone_room(block, tile, torch.empty(size, dtype=torch.uint8))
    for number in range(6):
        payloads = torch.tensor([[draw.randrange(256) for _ in range(size)] for _ in range(2)], dtype=torch.uint8)
        if number % 3:  # tiles that are there
            payloads[:, 4 * block.segment_count + HEAD : head].view(torch.int32).fill_(8 * (size - head) // number)
        results = []
        for kernels in (gpu, reference):
            out = guarded(values := normal(4).numel(), False, torch.float32)
            out.copy_(normal(4)[:values])
            kernels.deadzone_decode(block, payloads, tile, out, 0.5)
            results.append(out.clone())
            del out
        assert same(*results)
    release()


@pytest.mark.parametrize("shape", [(1, 1), (7, 300), (20, 33)])
@pytest.mark.parametrize("rank", [0, 1, 4])
@pytest.mark.parametrize("remembers", [False, True])
def test_coordinates_of_rows_and_back(shape: tuple[int, int], rank: int, remembers: bool) -> None:
    (n, m), block = shape, block_of((shape[0] * shape[1],), "model")
    basis, first = normal(6)[: rank * m].view(rank, m), int(block.runs[0, 0])
    source = Compensated(normal(1), normal(2), 0.9, 0.3) if remembers else Compensated(normal(1))
    results = []
    for kernels in (gpu, reference):
        coordinates, rest, back = torch.full((rank, n), 7.0), copied(normal(3)), copied(normal(4))
        combined = torch.full((rank, m), 7.0)
        kernels.split_rows(block, source, basis, coordinates, rest)
        kernels.add_product(block, coordinates, basis, rest, back)
        coordinates[:, ::3] = 0
        kernels.combine_rows(block, coordinates, back, combined)
        results.append((coordinates, rest, back, combined))
        assert torch.equal(back[:first], normal(4)[:first])
        assert torch.equal(back[first + n * m :], normal(4)[first + n * m :])
    for ours, theirs in zip(*results, strict=True):
        assert same(ours, theirs)
