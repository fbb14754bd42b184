"""The largest of segments of many tiles, where a sample says what it should and where it misleads."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from interpreted import by_the_gpu  # noqa: F401
from torch import Tensor

from gradwire.kernels import Compensated, gpu, reference
from gradwire.kernels.gpu import _edges
from gradwire.layout import Block
from kernel_inputs import block_of, counts_of, same

NUMEL = 21_000
ONE = block_of((NUMEL,))


def drawn(seed: int = 0) -> Tensor:
    return torch.randn(NUMEL + 100, generator=torch.Generator().manual_seed(seed))


def sampled() -> Tensor:
    """Which elements of :data:`ONE` a sample has."""
    stride = -(-NUMEL // _edges.SAMPLES)
    i = np.arange(_edges.SAMPLES, dtype=np.uint64)
    element = i * stride + ((i * np.uint64(0x9E3779B9) & np.uint64(0xFFFFFFFF)) * np.uint64(stride) >> np.uint64(32))
    places = torch.from_numpy(element[element < NUMEL].astype(np.int64)) + int(ONE.runs[0, 0])
    return torch.zeros(NUMEL + 100, dtype=torch.bool).index_fill(0, places, True)


def sparse(share: float) -> Tensor:
    return torch.where(torch.rand(NUMEL + 100, generator=torch.Generator().manual_seed(1)) < share, drawn(), 0.0)


def not_finite(at: int) -> Tensor:
    return drawn().index_fill(0, torch.tensor([at]), torch.nan)


VALUES = {
    "normal": drawn(),
    "zeros": torch.zeros(NUMEL + 100),
    "signs": drawn().sign(),
    "levels": drawn().mul(1.5).round(),
    "mostly zeros": sparse(0.001),
    "some zeros": sparse(0.06),
    "bfloat16": drawn().bfloat16().float(),
    "denormals": drawn() * 1e-40,
    "of all sizes": drawn() * torch.exp2(40 * drawn(1)),
    "not finite at first": not_finite(3),
    "not finite at last": not_finite(NUMEL - 3),
    "large where not sampled": torch.where(sampled(), 1e-3, drawn()),
    "small where not sampled": torch.where(sampled(), drawn() + 100, drawn() * 1e-20),
    "one where not sampled": torch.where(sampled(), 1e-3, 0.0).index_fill(0, (~sampled()).nonzero()[500:501, 0], 1e30),
}


def check(block: Block, values: Tensor, counts: np.ndarray) -> None:
    outcomes = []
    for kernels in (gpu, reference):
        residual = torch.ones_like(values)
        places, chosen = torch.full((int(counts.sum()),), -1), torch.zeros(int(counts.sum()))
        kernels.topk_select(block, Compensated(values, residual, 0.0, 1.0), counts, places, chosen)
        outcomes.append((places, chosen, residual))
    for own, specified in zip(*outcomes, strict=True):
        assert same(own, specified)


@pytest.mark.parametrize("samples", [_edges.SAMPLES, 16])
@pytest.mark.parametrize("kind", VALUES)
def test_exactly_the_largest(kind: str, samples: int) -> None:
    with mock.patch.object(_edges, "SAMPLES", samples):
        for share in (0.001, 0.05, 0.6):
            check(ONE, VALUES[kind], counts_of(ONE, share))


@pytest.mark.parametrize("lengths", [((9000, 1, 4097, 7700), "layer"), ((9000, 1, 4097), "bucket")])
def test_of_several_segments_and_runs(lengths: tuple[tuple[int, ...], str]) -> None:
    block, values = block_of(*lengths), drawn()
    values[5000:15_000] = VALUES["mostly zeros"][5000:15_000]
    for spoilt in (False, True):
        values[9004] = torch.nan if spoilt else 1.0
        check(block, values, counts_of(block, 0.05))


@pytest.mark.parametrize("count", [0, 1, NUMEL - 1, NUMEL])
def test_few_and_all(count: int) -> None:
    check(ONE, drawn(), np.array([count]))


def test_others_are_wanted_next_time() -> None:
    for count in (7, 4000, 7):
        check(ONE, drawn(count), np.array([count]))
