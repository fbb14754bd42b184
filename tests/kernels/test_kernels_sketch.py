"""Count sketches: the compiled kernels against plain torch bit for bit, and what they promise."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.codecs.sketch import CountSketch
from gradwire.kernels import cpu, reference
from gradwire.layout import Block, Granularity, Slot
from gradwire.randomness import key_of
from kernel_inputs import BLOCKS, BUFFER, GRADIENTS, KEY, covered, normal, same
from together import together

FINITE = ["normal", "signed zeros", "ties", "denormals", "huge"]


@together("name", [name for name in BLOCKS if not name.startswith("large")])
@together("values", FINITE)
@together("rows", [1, 5])
def test_sketch_and_estimates_are_the_reference(name: str, values: str, rows: int) -> None:
    block = BLOCKS[name]
    widths = np.maximum(16, block.segment_numels // 10).astype(np.int64)
    tables = torch.full((2, rows * int(widths.sum())), 7.0)
    for table, kernels in zip(tables, (cpu, reference), strict=True):
        kernels.sketch(block, GRADIENTS[values], widths, rows, KEY, table)
    assert same(*tables)
    outs = [normal(1), normal(1)]
    for out, kernels in zip(outs, (cpu, reference), strict=True):
        kernels.sketch_estimates(block, tables[0], widths, rows, KEY, out)
    assert same(*outs)
    assert same(outs[0][~covered(block)], normal(1)[~covered(block)])


def test_a_sketch_does_not_depend_on_where_values_lie() -> None:
    """Shared randomness is keyed by parameter and element, never by the buffer."""
    tables = []
    for offset in (0, 40):
        block = Block.cut([Slot("weight", (3000,), offset)], Granularity("layer"))
        values = torch.zeros(BUFFER)
        values[offset : offset + 3000] = normal()[:3000]
        tables.append(torch.empty(3 * 50))
        cpu.sketch(block, values, np.array([50]), 3, KEY, tables[-1])
    assert torch.equal(*tables)


def test_what_is_not_finite_in_a_table_is_not_finite_in_the_estimates() -> None:
    block = Block.cut([Slot("weight", (100,), 0)], Granularity("layer"))
    out = torch.zeros(100)
    cpu.sketch_estimates(block, torch.full((48,), torch.nan), np.array([16]), 3, KEY, out)
    assert out.isnan().all()


def test_estimates_are_unbiased_with_the_variance_of_a_count_sketch() -> None:
    """One row: the error's mean square is the energy of all others over the columns, within 10 %, and its mean zero."""
    numel, width, draws = 2000, 100, 400
    block = Block.cut([Slot("weight", (numel,), 0)], Granularity("layer"))
    values = normal()[:numel].clone()
    table, estimates = torch.empty(width), torch.empty(draws, numel)
    for draw in range(draws):
        cpu.sketch(block, values, np.array([width]), 1, key_of(0, draw), table)
        cpu.sketch_estimates(block, table, np.array([width]), 1, key_of(0, draw), estimates[draw])
    errors = (estimates - values).double()
    expected = float(values.double().square().sum()) / width
    assert abs(float(errors.square().mean()) / expected - 1) < 0.1
    assert float(errors.mean(0).square().mean()) < 1.2 * expected / draws


def test_heavy_hitters_are_found() -> None:
    numel = 50_000
    block = Block.cut([Slot("weight", (numel,), 0)], Granularity("layer"))
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 0.01
    heavy = torch.arange(50) * 997
    values[heavy] = torch.where(heavy % 2 == 0, 1.0, -1.0)
    sketch, counts, out = CountSketch(7, 50.0), np.array([50]), torch.empty(numel)
    sketch.estimate(block, sketch.write(block, values, counts, KEY), counts, KEY, out)
    assert set(out.abs().topk(50).indices.tolist()) == set(heavy.tolist())
    assert (out - values)[heavy].abs().max() < 0.5


def test_tables_of_huge_values_stay_finite() -> None:
    block = Block.cut([Slot("weight", (400,), 0)], Granularity("layer"))
    assert CountSketch().write(block, torch.full((400,), 3e38), np.array([4]), KEY).isfinite().all()
