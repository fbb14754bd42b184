"""Blocks, gradients and memories that kernels are compared on."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from gradwire.layout import Block, Granularity, Slot
from gradwire.randomness import key_of
from together import together

KEY = key_of(7, 11, 3)
BUFFER = 12_000


def block_of(lengths: Sequence[int], granularity: str = "layer", hole: int = 3) -> Block:
    slots, offset = [], 2
    for index, length in enumerate(lengths):
        slots.append(Slot(f"parameter{index}", (length,), offset))
        offset += length + hole
    return Block.cut(slots, Granularity.parse(granularity))


BLOCKS = {
    "empty": block_of([]),
    "one element": block_of([1]),
    "odd layers": block_of([5, 64, 1, 4097, 33]),
    "one bucket": block_of([5, 64, 1, 4097, 33], "bucket"),
    "small blocks": block_of([5, 64, 1, 1003, 33], "block:100"),
    "large": block_of([9001, 700]),
    "large bucket": block_of([300, 9001, 700], "bucket"),
    "shard": block_of([300, 4097, 700]).shards(3)[1],
    "packed shard": block_of([300, 4097, 700], "bucket").shards(3)[2].packed(),
    "empty shard": block_of([3]).shards(4)[0],
}


@cache
def _drawn(seed: int) -> Tensor:
    return torch.randn(BUFFER, generator=torch.Generator().manual_seed(seed))


def normal(seed: int = 0) -> Tensor:
    return _drawn(seed).clone()


def with_values(seed: int, values: Sequence[float], share: float = 0.05) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(values), (BUFFER,), generator=generator)
    return torch.where(torch.rand(BUFFER, generator=generator) < share, torch.tensor(values)[chosen], normal(seed))


GRADIENTS = {
    "normal": normal(),
    "zeros": torch.zeros(BUFFER),
    "signed zeros": with_values(1, [0.0, -0.0], 1.0),
    "mostly zeros": with_values(2, [0.0], 0.995),
    "ties": normal().mul(2).round(),
    "denormals": normal() * 1e-40,
    "huge": with_values(3, [1e38, -1e38, 3.4028234e38], 0.5),
    "one outlier": normal().index_fill(0, torch.tensor([40]), 1e30),
    "nan": normal().index_fill(0, torch.tensor([9]), math.nan),
    "many infinities": with_values(4, [math.inf, -math.inf, math.nan], 0.001),
}

blocks = together("block", BLOCKS.values(), BLOCKS)
gradients = together("gradient", GRADIENTS.values(), GRADIENTS)
memories = together("memory", [None, (0.9, 0.3)], ["none", "weighted"])


def same(first: Tensor, second: Tensor) -> bool:
    """Equal bit for bit, but for which NaN it is."""
    if first.is_floating_point():
        nan = first.isnan()
        return torch.equal(nan, second.isnan()) and torch.equal(
            first.masked_fill(nan, 0).view(torch.int32), second.masked_fill(nan, 0).view(torch.int32)
        )
    return torch.equal(first, second)


def residuals(memory: tuple[float, float] | None) -> tuple[Tensor | None, Tensor | None, float, float]:
    if memory is None:
        return None, None, 1.0, 1.0
    return normal(99), normal(99), *memory


def no_kernels(device: str) -> dict[str, Any]:
    """For ``dispatch.overrides``, in a hundredth of the time that a mock takes to be made."""
    return {}


def counts_of(block: Block, share: float) -> np.ndarray:
    return np.ceil(block.segment_numels * share).astype(np.int64)


def covered(block: Block) -> Tensor:
    mask = torch.zeros(BUFFER, dtype=torch.bool)
    for part in block.parts(mask):
        part.fill_(True)
    return mask


def strided(size: int, rows: int) -> Tensor:
    return torch.full((rows, size + 8), 0xA5, dtype=torch.uint8)[:, 4 : 4 + size]


floats = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)
