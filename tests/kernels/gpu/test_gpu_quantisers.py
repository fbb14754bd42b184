"""Quantisers in Triton write and read the bits of the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreted import BLOCKS, LONG, by_the_gpu, of_all_kinds  # noqa: F401

import elsewhere
from codec_checks import cases, check_any_bytes, check_is_the_reference
from gradwire.codecs.quantize import Quantiser
from gradwire.kernels import Code, Compensated, codes, gpu, payload_bytes, reference
from gradwire.kernels.gpu import quantise as gpu_quantise
from gradwire.kernels.gpu._launch import launch
from gradwire.kernels.gpu._measured import _add_up
from gradwire.kernels.reference._torch import CHUNK, segment_total
from gradwire_bench.gpu_operations import CODES
from guarded import copied, guarded, release
from kernel_inputs import BUFFER, KEY, block_of, normal, same

FITTED = (
    codes.NonUniform(2, (0.0, 1.0)),
    codes.NonUniform(4, (0.0, 0.01, 0.05, 0.1, 0.25, 0.4, 0.75, 1.0)),
    codes.NonUniform.powers(8),
)
each_code = pytest.mark.parametrize("code", [*(code for code, _ in CODES.values()), *FITTED], ids=str)


@each_code
@pytest.mark.parametrize(("name", "memory"), [("layers of any kind", (0.9, 0.3)), ("small segments", None)])
def test_is_the_reference(code: Code, name: str, memory: tuple[float, float] | None) -> None:
    check_is_the_reference(Quantiser(code), BLOCKS[name], of_all_kinds(BLOCKS[name]), memory)


@pytest.mark.parametrize("code", [codes.OneBit(), codes.TernGrad(), codes.Natural(9)], ids=str)
@pytest.mark.parametrize("name", ["one bucket", "a shard", "empty"])
def test_is_the_reference_on_any_block(code: Code, name: str) -> None:
    check_is_the_reference(Quantiser(code), BLOCKS[name], of_all_kinds(BLOCKS[name]), (0.9, 0.3))


@pytest.mark.parametrize("code", [codes.Sign(), codes.OneBit(), codes.TernGrad(clip=2.5)], ids=str)
def test_sums_have_one_order(code: Code) -> None:
    """Several chunks a run, and several runs a segment."""
    payloads = torch.zeros(2, payload_bytes(code, LONG), dtype=torch.uint8)
    buffer = torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * 1e3
    gpu.encode(code, LONG, Compensated(buffer), payloads[0], KEY)
    reference.encode(code, LONG, Compensated(buffer), payloads[1], KEY)
    assert same(*payloads)


@pytest.mark.parametrize("chunks", [33, CHUNK + 37])
def test_sums_of_many_chunks_have_one_order(chunks: int) -> None:
    """Of numbers that nearly cancel, so that another order is another scale."""
    totals = torch.randn(chunks, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 1e9
    totals[-1] -= totals.sum() - 1e-6
    own, scales = gpu_quantise.CODES[codes.Sign](codes.Sign()), torch.zeros(1)
    sums, marks = torch.stack((totals, totals), 1).flatten(), torch.zeros(2 * chunks, dtype=torch.int32)
    table, numels, places = (torch.tensor(each) for each in ([0] * 7, [1], [0, 0, 0]))
    segments, runs = torch.tensor([0, 2]), torch.tensor([0, 5, chunks])
    given = (table, segments, runs, numels, sums, marks, scales, places)
    launch(_add_up, 1, *given, CODE=codes.Sign(), TERMS=own.terms, SCALE=own.scale, WORDS=1, warps=1)
    each = [torch.nn.functional.pad(total, (0, 1)) for total in totals.split(1)]  # a chunk of one value
    assert scales.item() == torch.tensor(segment_total(each)).float().item() != 0


@pytest.mark.parametrize("memory", [None, (0.9, 0.3)])
@pytest.mark.parametrize("count", [3, 40])
@each_code
def test_all_shards_at_once(code: Code, count: int, memory: tuple[float, float] | None) -> None:
    """Sizes differ, and with many owners some have nothing; each row goes on with zeros."""
    shards = block_of((70, 300, 33)).shards(count)
    sizes = [payload_bytes(code, shard) for shard in shards]
    outcomes, gradient, seen = [], of_all_kinds(block_of((70, 300, 33))), normal(5)
    for kernels in (gpu, elsewhere):
        rows, residual, out = torch.full((count, max(sizes) + 12), 0xA5, dtype=torch.uint8), normal(6), seen.clone()
        source = Compensated(gradient) if memory is None else Compensated(gradient, residual, *memory)
        written = rows[:, : max(sizes) + 4]
        kernels.encode_each(code, shards, source, written, KEY)
        kernels.decode_each(code, shards, written, out)
        outcomes.append((rows, residual, out))
    for own, specified in zip(*outcomes, strict=True):
        assert same(own, specified)


@each_code
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_anything_is_the_reference(code: Code, case: tuple) -> None:
    block, gradient, memory, key = case
    check_is_the_reference(Quantiser(code), block, gradient, memory, key)


@each_code
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(content=st.lists(st.integers(0, 255), min_size=1, max_size=60))
def test_any_bytes_are_read_as_by_the_reference(code: Code, content: list[int]) -> None:
    check_any_bytes(Quantiser(code), block_of([5, 64, 33]), content)


@each_code
@pytest.mark.parametrize("end", [True, False])
def test_stays_inside(code: Code, end: bool) -> None:
    block = block_of([77, 41], hole=0).packed()
    numel = int(block.runs[-1, 0] + block.runs[-1, 1])
    gradient, residual, out = copied(normal(1)[:numel], end), copied(normal(2)[:numel], end), guarded(numel, end)
    payloads = guarded(2 * payload_bytes(code, block), end, torch.uint8).view(2, -1)
    for payload in payloads:
        gpu.encode(code, block, Compensated(gradient, residual, 0.9, 1.0), payload, KEY)
    gpu.decode(code, block, payloads, out, 0.5)
    del gradient, residual, out, payloads, payload
    release()


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("before", [0, 1])
def test_codes_that_add_up(bits: int, clipped: bool, before: int) -> None:
    """Also where they do not begin at a word."""
    code, block = codes.Integers(bits, (1 << (bits - 1)) - 1, 1), block_of((70, 64, 300, 33))
    gradient, outcomes = of_all_kinds(block), []
    for kernels in (gpu, reference):
        residual, scales, out = normal(4), guarded(4, True), torch.zeros(BUFFER)
        kernels.integer_scales(code, block, Compensated(gradient, residual, 0.9, 0.3), scales)
        scales /= 3 if clipped else 1  # what is beyond saturates
        written = torch.full((before + code.layout.body(block.positions),), 0xA5, dtype=torch.uint8)[before:]
        kernels.integer_encode(code, block, residual, True, scales, written, KEY)
        kernels.integer_decode(code, block, scales, written, out)
        kernels.euclidean_norms(block, gradient, norms := guarded(4, True))
        outcomes.append((residual, scales, written, out, norms))
    for own, specified in zip(*outcomes, strict=True):
        assert same(own, specified)
