"""Kernels on several threads: the same bits as on one, wherever blocks are cut."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from golden import ROUNDED, differences, recorded, stored
from gradwire import kernels
from gradwire.kernels import Compensated
from gradwire.kernels import parts as cuts
from gradwire.kernels.parts import Part, of_runs, of_segments, of_tiles, ranges, side_by_side
from gradwire.kernels.reference import deadzone_payload_bytes
from gradwire.layout import ALIGNMENT, Block, Granularity, flat_slots
from kernel_inputs import BUFFER, GRADIENTS, KEY, block_of, blocks, gradients, normal, same
from together import together

THREADS = 3


@pytest.fixture
def _threads() -> Iterator[None]:
    torch.set_num_threads(THREADS)
    with mock.patch.object(cuts, "_least", 8):
        yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(
    "method",
    [
        *("acpsgd", "deadzone", "dgc", "dithered", "eden", "ef21", "efsignsgd", "gtopk", "natural", "nuqsgd", "onebit"),
        *("powersgd", "qsgd", "subspace", "terngrad", "thc", "topk"),
    ],
)
def test_a_method_does_on_threads_what_its_golden_vectors_hold(method: str) -> None:
    assert not differences(stored(method), recorded(method), method in ROUNDED)


def _elements(block: Block) -> list[int]:
    return [element for start, length, _ in block.runs.tolist() for element in range(start, start + length)]


def _check_parts(block: Block, parts: list[Part]) -> None:
    """Parts are the block's elements in order, each with its position, origin, stream and segment."""
    assert [element for part in parts for element in _elements(part.block)] == _elements(block)
    segment_of = np.repeat(np.arange(block.segment_count), np.diff(block.segments))
    known = {}
    for (start, length, position), origin, stream, segment in zip(
        block.runs.tolist(), block.origins.tolist(), block.streams.tolist(), segment_of.tolist(), strict=True
    ):
        for i in range(length):
            known[start + i] = (position + i, origin + i, stream, segment)
    before = 0
    for part in parts:
        own, own_segments = part.block, np.repeat(np.arange(part.block.segment_count), np.diff(part.block.segments))
        assert part.element == before
        before += own.numel
        for (start, _, position), origin, stream, segment in zip(
            own.runs.tolist(), own.origins.tolist(), own.streams.tolist(), own_segments.tolist(), strict=True
        ):
            assert known[start] == (position, origin, stream, part.segment + segment)
        if own.numel:
            start, length, _ = block.runs[part.run].tolist()
            assert start <= own.runs[0, 0] < start + length


@pytest.mark.usefixtures("_threads")
@blocks
def test_parts_are_a_block(block: Block) -> None:
    for parts in (of_runs(block), of_runs(block, 64), of_segments(block), of_tiles(block, 32)):
        _check_parts(block, parts)
        assert len(parts) <= THREADS
    assert all(part.block.runs[0, 2] % ALIGNMENT == 0 for part in of_runs(block) if part.block.numel)
    assert all(part.element % 32 == 0 for part in of_tiles(block, 32))
    ends = {0, *np.cumsum(block.segment_numels).tolist()}
    assert all(part.element in ends for part in of_segments(block))
    if block.numel > 100:
        assert len(of_runs(block)) > 1


@given(st.integers(0, 300), st.integers(0, 10**7), st.integers(1, 40), st.integers(1, 9))
@settings(deadline=None)
def test_ranges_are_all_rows(count: int, numel: int, multiple: int, threads: int) -> None:
    with mock.patch.object(torch, "get_num_threads", return_value=threads):
        cut = ranges(count, numel, multiple)
    assert len(cut) <= threads
    assert [row for begin, end in cut for row in range(begin, end)] == list(range(count))
    assert all(begin % multiple == 0 for begin, _ in cut)
    assert all(end == begin for (_, end), (begin, _) in pairwise(cut))


def _on_threads(work, *given: Tensor) -> list[list[Tensor]]:
    """What ``work`` returns and makes of copies of tensors, on one thread and on some."""
    found = []
    for threads, least in ((1, cuts.LEAST), (THREADS, 8)):
        torch.set_num_threads(threads)
        copies = [each.clone() for each in given]
        with mock.patch.object(cuts, "_least", least):
            answers = work(*copies)
        torch.set_num_threads(1)
        found.append([*copies, *(torch.as_tensor(each) for each in answers or ())])
    return found


@blocks
@gradients
def test_statistics_and_sums_are_the_same(block: Block, gradient: Tensor) -> None:
    one, several = _on_threads(
        lambda gradient, residual: kernels.magnitude_statistics(block, Compensated(gradient, residual, 0.9, 0.3)),
        gradient,
        normal(3),
    )
    assert all(map(same, one, several))
    one, several = _on_threads(
        lambda gradient, residual: [bool(kernels.accumulate(block, gradient, residual, 0.9, 0.3))], gradient, normal(3)
    )
    assert all(map(same, one, several))


@together("room", [0.0, 0.3, 0.5, 0.9, 2.0])
@together("granularity", ["layer", "model"])
def test_codes_end_in_the_same_place(granularity: str, room: float) -> None:
    """Wherever the room ends, in any part or none."""
    block = Block.cut(flat_slots([("a", (70, 31)), ("b", (900,)), ("c", (40, 11))]), Granularity(granularity))
    size = deadzone_payload_bytes(block, 64, 4 * room) // 4 * 4
    steps = torch.full((block.segment_count,), 0.5)

    def encode(values: Tensor, payload: Tensor) -> list[Tensor | bool]:
        fits = kernels.deadzone_encode(block, values, True, steps, (128, 100, 90), 64, payload)
        out = torch.zeros_like(values)
        kernels.deadzone_decode(block, payload[None], 64, out, 1.0)
        return [out, bool(fits)]

    one, several = _on_threads(encode, normal()[: block.numel], torch.full((size,), 0x5A, dtype=torch.uint8))
    assert all(map(same, one, several))
    assert bool(one[-1]) == (room > 0.8)


@blocks
def test_rounded_to_half_the_bits_they_are_the_same(block: Block) -> None:
    one, several = _on_threads(lambda kept: kernels.narrow(block, normal(1), kept, KEY), torch.zeros(BUFFER).bfloat16())
    assert all(map(same, one, several))


@together("rank", [1, 4, 6])
@together("name", ["normal", "nan", "many infinities", "huge"])
def test_factors_are_the_same(name: str, rank: int) -> None:
    """Up to how products are rounded; bit for bit where ranks must agree."""
    block, gradient = block_of([9000]), GRADIENTS[name]
    slot = block.slots[0]
    block = Block.cut([type(slot)(slot.name, (90, 100), slot.offset)], Granularity("layer"))
    q, p = normal(5)[: rank * 100].view(rank, 100) / 100, normal(6)[: rank * 90].view(rank, 90) / 90

    def project(kernel, fixed: Tensor, shape: tuple[int, int]):
        def work(residual: Tensor) -> list[Tensor | bool]:
            found = torch.zeros(shape)
            finite = kernel(block, Compensated(gradient, residual, 0.9, 1.0), fixed, found, fixed)
            return [found, bool(finite)]

        return work

    for work in (
        project(kernels.project_rows, q, (rank, 90)),
        project(kernels.project_columns, p, (rank, 100)),
    ):
        one, several = _on_threads(work, normal(7))
        for left, right in zip(one, several, strict=True):
            torch.testing.assert_close(right, left, rtol=1e-4, atol=1e-5, equal_nan=True)
    one, several = _on_threads(
        lambda out, residual: kernels.write_product(block, p, q, out, residual), normal(8), normal(9)
    )
    assert all(map(same, one, several))


@blocks
def test_positions_in_order_are_the_same(block: Block) -> None:
    covered = torch.cat(
        [torch.arange(position, position + length) for _, length, position in block.runs.tolist()]
        or [torch.empty(0, dtype=torch.int64)]
    )
    for share in (0.0, 0.05, 1.0):
        chosen = [
            covered[torch.rand(len(covered), generator=torch.Generator().manual_seed(row)) <= share] for row in range(3)
        ]
        count = min(map(len, chosen))
        positions = torch.stack([each[:count] for each in chosen])
        values = torch.randn(3, count, generator=torch.Generator().manual_seed(4))
        for kernel in (kernels.scatter_mean, lambda *given: kernels.scatter_sum(*given, 0.5)):
            one, several = _on_threads(lambda out: kernel(block, positions, values, out), normal(2))  # noqa: B023
            assert all(map(same, one, several))


def test_what_one_part_raises_is_raised_once_all_have_ended() -> None:
    ended = []

    def work(number: int) -> None:
        if number == 1:
            raise OSError("of a part")
        ended.append(number)

    with mock.patch.object(torch, "get_num_threads", return_value=4), pytest.raises(OSError, match="of a part"):
        side_by_side(work, range(8))
    assert set(ended) <= set(range(8)) - {1}


def test_where_no_thread_can_be_begun_one_does_all() -> None:
    over = RuntimeError("cannot schedule new futures after interpreter shutdown")
    with mock.patch.object(torch, "get_num_threads", return_value=4), mock.patch.object(cuts, "_pool") as pool:
        pool.return_value.submit.side_effect = over
        assert side_by_side(str, range(8)) == list("01234567")


def test_threads_are_not_missed_in_a_copy_of_the_process() -> None:
    with mock.patch.object(torch, "get_num_threads", return_value=4):
        assert side_by_side(str, range(8)) == list("01234567")
        child = multiprocessing.get_context("fork").Process(target=side_by_side, args=(str, range(8)))
        child.start()
        child.join(30)
    assert child.exitcode == 0
