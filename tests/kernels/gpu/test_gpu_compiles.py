"""Kernels in Triton compile for GPUs that are not here: exactly as they are written, and within registers."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'gradwire[gpu]'")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets here, and compiles nothing", allow_module_level=True)

from compiling import check, launched

from gradwire.kernels import Code, Compensated, Places, codes, gpu, payload_bytes
from gradwire.kernels.reference import deadzone_payload_bytes, elias_fano_bytes
from gradwire.layout import Block, Granularity, Slot
from kernel_inputs import KEY, block_of, counts_of, normal

LONG = Block.cut([Slot("weight", (8192,), 0)], Granularity("layer"))
SMALL = LONG.divided(512)
PLACES = Places.of([(0, 7, 100, 4, 0, 7, 0), (700, 9, 50, 2, 28, 9, 400)])

CODES = {
    "sm_90": (
        codes.Sign(),
        codes.Vote(),
        codes.Ballot(),
        codes.Ballot(8),
        codes.OneBit(),
        codes.QSGD(4),
        codes.QSGD(2, euclidean=True),
        codes.QSGD(8, nearest=True),
        codes.NUQSGD(4),
        codes.TernGrad(clip=2.5),
        codes.ThreeLC(1.3),
        codes.Natural(9),
        codes.Exponent(),
        codes.Dynamic(),
        codes.NonUniform.powers(4),
    ),
    "sm_80": (codes.Sign(), codes.QSGD(4), codes.Dynamic()),
    "gfx942": (codes.Sign(), codes.QSGD(4), codes.TernGrad()),
}


def check_all(call: Callable[[], object], target: str) -> None:
    launches = launched(call)
    assert launches
    for launch in launches:
        check(launch.compiled(target), target)


CALLS: dict[str, Callable[[Block], object]] = {
    "accumulate": lambda block: gpu.accumulate(block, normal(), normal(1), 0.9, 1.0),
    "narrow": lambda block: gpu.narrow(block, normal(), normal().bfloat16(), KEY),
    "checksums": lambda block: gpu.checksums(normal().view(torch.int32)[None], torch.zeros(1, dtype=torch.int64)),
    "randomk": lambda block: gpu.randomk_positions(block, counts_of(block, 0.1), places(block), KEY),
    "gather": lambda block: gpu.gather(block, normal(), places(block), normal()),
    "subtract": lambda block: gpu.subtract(block, normal(), places(block), normal()),
    "scatter_sum": lambda block: (
        gpu.scatter_sum(block, places(block)[None], normal()[None], normal(), 0.5),
        gpu.scatter_sum(block, places(block).repeat(2, 1), normal().repeat(2, 1), normal(), 0.5),
    ),
    "elias_fano": lambda block: (
        gpu.elias_fano_encode(places(block), block.positions, indices(block)),
        gpu.elias_fano_decode(indices(block), block.positions, places(block)),
    ),
    "write_product": lambda block: gpu.write_product(block, thin(64), thin(128), normal(), normal(1)),
    "project": lambda block: (
        gpu.project_rows(block, Compensated(normal(), normal(1), 0.9, 1.0), thin(128), thin(64), thin(128)),
        gpu.project_columns(block, Compensated(normal()), thin(64), thin(128), None),
        gpu.remember_factors([thin(64)[None]], [thin(64)[None]]),
    ),
    "orthonormalise": lambda block: (
        gpu.orthonormalise(normal()[: 2 * 4 * 70].view(2, 4, 70)),
        gpu.orthonormalise(normal()[: 2 * 5000].view(1, 2, 5000)),
        gpu.scale_each([normal()[: 2 * 5000].view(1, 2, 5000)]),
        gpu.refill_each([normal()[: 2 * 5000].view(1, 2, 5000)], [normal(1)[: 2 * 5000].view(1, 2, 5000)]),
    ),
    "deadzone": lambda block: (
        gpu.deadzone_scales(block, Compensated(normal(), normal(1), 0.9, 1.0)),
        gpu.deadzone_sample(block, normal(), normal(1)[: block.segment_count], 1000),
        gpu.deadzone_dither(block, normal(), normal(1)[: block.segment_count], KEY, normal(2)),
        gpu.deadzone_encode(block, normal(), True, steps(block), (100, 130, 128), 1024, levels(block)),
        gpu.deadzone_decode(block, levels(block)[None].repeat(2, 1), 1024, normal(), 0.5),
    ),
    "subspace": lambda block: (
        gpu.split_rows(block, Compensated(normal(), normal(1), 0.9, 1.0), thin(128), thin(64), normal(2)),
        gpu.add_product(block, thin(64), thin(128), normal(1), normal(2)),
        gpu.combine_rows(block, thin(64), normal(1), thin(128)),
        gpu.add_products(PLACES, normal(), normal(1), normal(2), normal(3), torch.tensor(True)),
        gpu.weights_each(PLACES, normal(), normal(1)),
    ),
    "topk": lambda block: gpu.topk_select(
        block, Compensated(normal(), normal(1), 0.9, 1.0), counts_of(block, 0.1), places(block), normal()
    ),
}


def places(block: Block) -> torch.Tensor:
    return torch.arange(int(counts_of(block, 0.1).sum()))


def thin(length: int) -> torch.Tensor:
    return normal(2)[: 4 * length].view(4, length)


def steps(block: Block) -> torch.Tensor:
    return normal(3)[: block.segment_count].abs()


def levels(block: Block) -> torch.Tensor:
    return torch.zeros(deadzone_payload_bytes(block, 1024, 2.0), dtype=torch.uint8)


def indices(block: Block) -> torch.Tensor:
    return torch.zeros(elias_fano_bytes(len(places(block)), block.positions), dtype=torch.uint8)


@pytest.mark.parametrize("block", [LONG, SMALL], ids=["long", "small"])
@pytest.mark.parametrize("call", CALLS)
def test_others_compile(call: str, block: Block) -> None:
    for target in ("sm_90", "gfx942") if call == "topk" and block is LONG else ("sm_90",):
        check_all(lambda: CALLS[call](block), target)


@pytest.mark.parametrize(("target", "code"), [(target, code) for target, all_of in CODES.items() for code in all_of])
def test_codes_compile(target: str, code: Code) -> None:
    block = SMALL if isinstance(code, codes.QSGD) and not code.euclidean else LONG
    payloads = torch.zeros(2, payload_bytes(code, block), dtype=torch.uint8)
    check_all(lambda: gpu.encode(code, block, Compensated(normal(), normal(1), 0.9, 1.0), payloads[0], KEY), target)
    check_all(lambda: gpu.decode(code, block, payloads, normal(), 0.5), target)


def test_all_shards_take_the_launches_of_one() -> None:
    code, shards = codes.OneBit(), LONG.shards(8)
    payloads = torch.zeros(8, payload_bytes(code, shards[0]), dtype=torch.uint8)
    written = launched(lambda: gpu.encode_each(code, shards, Compensated(normal(), normal(1)), payloads, KEY))
    read = launched(lambda: gpu.decode_each(code, shards, payloads, normal()))
    assert [len(each) for each in (written, read)] == [3, 1]


def test_all_matrices_take_the_launches_of_one() -> None:
    calls: list[Callable[[], object]] = [
        lambda: gpu.split_rows_each(PLACES, Compensated(normal(), normal(1)), normal(2), normal(3), normal(4)),
        lambda: gpu.add_products(PLACES, normal(), normal(1), normal(2), normal(3)),
        lambda: gpu.combine_rows_each(PLACES, normal(), normal(1), normal(2)),
        lambda: gpu.weights_each(PLACES, normal(), normal(1)),
    ]
    assert [len(launched(call)) for call in calls] == [2, 1, 1, 1]


WIDE = {
    "accumulate": ("_leave", ("ld.global.v4", "st.global.v4")),
    "narrow": ("_narrow", ("ld.global.v4", "st.global.v2")),
    "topk": ("_keep", ("ld.global.v4",)),
    "encode": ("_write", ("ld.global.v4", "st.global.v4")),
    "decode": ("_decode", ("st.global.v4",)),
}
"""Of kernels that touch every value, how they do it where tiles begin and end at 16 bytes."""


@pytest.mark.parametrize("call", WIDE)
def test_aligned_tiles_are_touched_16_bytes_at_a_time_and_others_are_not(call: str) -> None:
    code, (kernel, wide) = codes.QSGD(4), WIDE[call]
    for block, aligned in ((LONG, True), (block_of((8192,)), False)):
        payload = torch.zeros(1, payload_bytes(code, block), dtype=torch.uint8)
        calls = {
            **CALLS,
            "encode": lambda block, to=payload: gpu.encode(code, block, Compensated(normal(), normal(1)), to[0], KEY),
            "decode": lambda block, to=payload: gpu.decode(code, block, to, normal(), 1.0),
        }
        launch = next(each for each in launched(lambda: calls[call](block)) if each.name == kernel)  # noqa: B023
        ptx = launch.compiled("sm_90").asm["ptx"]
        assert [access in ptx for access in wide] == [aligned] * len(wide)
