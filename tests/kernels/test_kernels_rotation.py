"""Rotations and homomorphic levels: the compiled kernels against plain torch bit for bit, and what they promise."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from gradwire.codecs.transform import Levels, Rotation
from gradwire.kernels import cpu, dispatch, reference
from gradwire.layout import Block, Granularity, Slot
from gradwire.randomness import key_of
from kernel_inputs import BLOCKS, GRADIENTS, KEY, covered, normal, same
from together import together

OWN = key_of(1, 2, 3)
LEVELS = Levels()


@together("name", BLOCKS)
@together("values", ["normal", "zeros", "signed zeros", "denormals", "huge", "one outlier"])
@together("size", [64, 4096])
def test_rotations_are_the_reference(name: str, values: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rotation, count = Rotation.of(BLOCKS[name], size), 2
    outcomes = []
    for kernels in (cpu, reference):
        monkeypatch.setattr(dispatch, "overrides", lambda device, kernels=kernels: vars(kernels))
        memory, out = GRADIENTS[values].clone(), normal(1)
        scales = rotation.scales(memory)
        scales[1::3] *= 1.5
        scales[2::5] = torch.inf
        payloads = torch.full((count, rotation.payload_bytes), 0xA5, dtype=torch.uint8)
        rotation.encode(normal(3), None, scales, LEVELS, KEY, OWN + 1, payloads[0])
        rotation.encode(memory, memory, scales, LEVELS, KEY, OWN, payloads[1])
        sums, wide = (torch.empty(width * 2 * rotation.payload_bytes, dtype=torch.uint8) for width in (1, 2))
        kernels.rotated_sums(payloads, LEVELS.tensor(sums.device), sums)
        kernels.rotated_sums(payloads, LEVELS.tensor(sums.device), wide)
        rotation.decode(sums, count, scales, LEVELS, KEY, out)
        again = normal(1)
        rotation.decode(wide, count, scales, LEVELS, KEY, again)
        assert same(out, again)
        assert same(out[~covered(BLOCKS[name])], normal(1)[~covered(BLOCKS[name])])
        assert memory.isfinite().all()
        outcomes.append((scales, payloads, sums, wide, memory, out))
    monkeypatch.undo()
    for ours, theirs in zip(*outcomes, strict=True):
        assert same(ours, theirs)


@pytest.mark.parametrize("length", [1, 7, 8, 100, 1003, 5000])
def test_pieces_fill_positions_with_powers_of_two(length: int) -> None:
    block = Block.cut([Slot("weight", (length,), 3)], Granularity("layer"))
    pieces = Rotation.of(block, 1024).pieces
    assert pieces[:, 1].sum() == length
    assert pieces[:, 2].sum() == block.positions
    assert (np.log2(pieces[:, 2]) % 1 == 0).all()
    assert (pieces[:, 2] <= 1024).all()


def test_the_transform_is_hadamards_and_its_own_inverse() -> None:
    from gradwire.kernels.reference.rotation import _hadamard

    matrix = torch.ones(1, 1)
    for _ in range(6):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    values = normal()[:64]
    torch.testing.assert_close(_hadamard(values), matrix @ values)
    torch.testing.assert_close(_hadamard(_hadamard(values)), 64 * values)


def test_the_table_is_the_best_of_all() -> None:
    """Against all symmetric tables, by numerical integration."""
    x = np.linspace(-LEVELS.reach, LEVELS.reach, 6001)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    at = (x / LEVELS.reach + 1) * 15

    def variance(table: np.ndarray) -> float:
        lower = np.clip(np.searchsorted(table, at, side="right") - 1, 0, 14)
        return float(((at - table[lower]) * (table[lower + 1] - at) * density).sum())

    halves = itertools.combinations(range(1, 15), 7)
    best = min((np.array([0, *half, *(30 - i for i in reversed(half)), 30]) for half in halves), key=variance)
    assert LEVELS.table == tuple(best.tolist())
    assert variance(np.array(LEVELS.table)) <= variance(best) * (1 + 1e-6)
    assert LEVELS.table[0] == 0
    assert LEVELS.table[-1] == 30
    assert [30 - i for i in reversed(LEVELS.table)] == list(LEVELS.table)
    assert Levels(15).table == tuple(range(16))


@pytest.mark.parametrize(
    ("grain", "shares", "published"),
    [
        (30, (16,), "0 2 4 6 8 10 12 14 16 18 20 22 24 26 28 30"),
        (30, (32, 64), "0 3 5 7 9 11 13 14 16 17 19 21 23 25 27 30"),
        (30, (128, 256), "0 4 6 8 10 12 13 14 16 17 18 20 22 24 26 30"),
        (30, (512,), "0 4 7 9 11 12 13 14 16 17 18 19 21 23 26 30"),
        (34, (16, 32, 64, 128), "0 3 6 8 10 12 14 16 18 20 22 24 26 28 31 34"),
        (34, (256, 512), "0 4 7 9 11 13 15 16 18 19 21 23 25 27 30 34"),
        (34, (1024,), "0 5 8 10 12 14 15 16 18 19 20 22 24 26 29 34"),
    ],
)
def test_the_table_is_the_authors(grain: int, shares: tuple[int, ...], published: str) -> None:
    """The tables of 16 levels in SophiaLi06/BytePS_THC, ``byteps/torch/tables``; one value in so many is clamped."""
    for share in shares:
        assert Levels(grain, 1 / share).table == tuple(map(int, published.split()))


def test_rounding_is_unbiased_but_for_clamping() -> None:
    """With almost nothing clamped, the mean of many draws is the input within 5 standard errors."""
    numel, draws, levels = 512, 600, Levels(60, 1e-7)
    rotation = Rotation.of(Block.cut([Slot("weight", (numel,), 0)], Granularity("layer")), 512)
    values, out = normal()[:numel].clone(), torch.empty(draws, numel)
    scales, payload = rotation.scales(values), torch.empty(1, rotation.payload_bytes, dtype=torch.uint8)
    sums = torch.empty(numel, dtype=torch.uint8)
    for draw in range(draws):
        rotation.encode(values, None, scales, levels, KEY, key_of(0, draw), payload[0])
        cpu.rotated_sums(payload, levels.tensor(sums.device), sums)
        rotation.decode(sums, 1, scales, levels, KEY, out[draw])
    error = (out.mean(0) - values).double()
    variance = out.double().var(0) / draws
    assert 0.75 <= error.square().sum() / variance.sum() <= 1.25
