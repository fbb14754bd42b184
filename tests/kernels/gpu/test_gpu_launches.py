"""The host's side of every launch: grids, arguments, streams and devices, and that no value compiles anything anew."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'gradwire[gpu]'")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets here, and launches nothing", allow_module_level=True)

import triton
import triton.language as tl
from compiling import Launch, a_driver, launched

from gradwire.errors import PayloadError
from gradwire.kernels import Compensated, dispatch, gpu, payload_bytes
from gradwire.kernels.gpu import _launch
from gradwire.kernels.reference import deadzone_payload_bytes, elias_fano_bytes
from gradwire.layout import Block, Granularity, Slot
from gradwire_bench.gpu_operations import CODES, FAMILIES
from kernel_inputs import KEY, block_of, counts_of, normal, strided

BLOCK = block_of((9001, 70))
"""Two segments of 3 + 1 tiles, or 18 + 1 of 512, on either side of a gap."""

NUMEL = 9001 + 70 + 5

MEASURED = [("_measure_tiles", 4), ("_add_up", 2), ("_write", 4)]
PROJECTED = [("_add_parts", 2), ("_mark", 2)]

PROGRAMS: dict[str, list[tuple[str, int]]] = {
    "accumulate": [("_leave", 4)],
    "narrow to bfloat16": [("_narrow", 4)],
    "checksums": [("_checksums", 3)],
    "top-k 1 %: select with residual": [
        ("_sample", 2),
        ("_keep", 4),
        *(3 * [("_narrow_down", 4)]),
        ("_count_chosen", 4),
        ("_write_chosen", 4),
    ],
    "random-k 1 %: choose": [("_choose", 2)],
    "gather 1 %": [("_visit", 1)],
    "subtract 1 %": [("_visit", 1)],
    "elias-fano 1 %: encode": [("_encode", 1)],
    "elias-fano 1 %: decode": [("_count", 1), ("_decode", 1), ("_check", 1)],
    "integer sums: scales with residual": MEASURED[:2],
    "integer sums: encode with residual": [("_write", 4)],
    "integer sums: decode": [("_decode", 4)],
    "rank 4: project rows with residual": [("_project_tiles", 24), *PROJECTED],
    "rank 4: project columns with residual": [("_project_tiles", 4), *PROJECTED],
    "rank 4: write product": [("_write", 24)],
    "dead zone: scales with residual": MEASURED[:2],
    "dead zone: sample": [("_sample", 143)],
    "dead zone: round by chance": [("_dither", 4)],
    "dead zone: encode with residual": [
        ("_begin", 1),
        ("_count", 4),
        ("_collect", 4),
        ("_classify", 1),
        ("_follow", 1),
        ("_measure", 1),
        ("_write", 1),
        ("_take", 4),
    ],
    "dead zone: decode 8": [("_read", 8), ("_add", 4)],
    "rank 4: split rows": [("_project", 95), ("_add_multiples", 24)],
    "rank 4: add product": [("_add_multiples", 24)],
    "rank 4: combine rows": [("_combine", 3)],
}
"""Kernels and how many programs of them, in the order of their launches."""


def programs(name: str) -> list[tuple[str, int]] | None:
    """What an operation launches; None for sums of sparse rows, which only have to be launches like others."""
    code = name.partition(": ")[0]
    if code not in CODES:
        return PROGRAMS.get(name)
    of_buckets = CODES[code][1]
    if "decode" in name:
        return [("_decode", 19 if of_buckets else 4)]
    return [("_write", 19)] if of_buckets else MEASURED


@pytest.fixture(autouse=True, scope="module")
def by_the_gpu() -> Iterator[None]:
    with mock.patch.object(dispatch, "overrides", return_value=vars(gpu)):
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_launched(family: str) -> None:
    for operation in FAMILIES[family](BLOCK, normal()[:NUMEL]):
        launches = launched(operation.run)
        wanted = programs(operation.name)
        if wanted is not None:
            assert [(each.name, each.grid[0]) for each in launches] == wanted
        for launch in launches:
            check(launch)


def check(launch: Launch) -> None:
    kernel = launch.source.fn
    assert launch.grid[0] > 0
    assert launch.grid[1:] == (1, 1)
    assert (launch.device, launch.stream) == (1, 1001)  # of the tensors, not the one that is current
    assert launch.options["enable_fp_fusion"] is False
    assert launch.options["num_warps"] in (1, 2, 4, 8)
    assert len(launch.arguments) == len(kernel.params)
    types = dict(launch.source.signature)
    for parameter, argument in zip(kernel.params, launch.arguments, strict=True):
        if isinstance(argument, torch.Tensor):
            assert argument.dim() == 0 or argument.stride(-1) == 1
            assert types[parameter.name].startswith("*")
        elif isinstance(argument, float):
            assert types[parameter.name] in ("fp32", "constexpr")
        if parameter.name in ("key_low", "key_high"):
            assert types[parameter.name] == "i32"


def matrix(side: int) -> Block:
    return Block.cut([Slot("matrix", (side, side), 0)], Granularity("layer"))


def positions(count: int) -> torch.Tensor:
    return torch.arange(2, 2 + count)


def thin(rank: int) -> torch.Tensor:
    return normal(2)[: 16 * rank * rank].view(rank, 16 * rank)


def dead_zones(n: int) -> torch.Tensor:
    size = deadzone_payload_bytes(BLOCK, 100 * n + 7, 2.0)
    return torch.zeros(n + 1, 4 * n + size, dtype=torch.uint8)[:, 4 * n :]


def rows(n: int) -> Block:
    return Block.cut([Slot("matrix", (7, n), n)], Granularity("model"))


def packed(count: int) -> torch.Tensor:
    return torch.zeros(elias_fano_bytes(count, BLOCK.positions), dtype=torch.uint8)


VARIED: dict[str, Callable[[int], object]] = {
    **{
        str(code): lambda n, code=code: (
            gpu.encode(
                code,
                BLOCK,
                Compensated(normal(), normal(1), 1.0 / n, 1.0),
                strided(payload_bytes(code, BLOCK), 8)[n],
                KEY >> (63 * (n == 1)),
            ),
            gpu.decode(code, BLOCK, strided(payload_bytes(code, BLOCK), 8)[:n], normal(), 1 / n),
        )
        for code, of_buckets in CODES.values()
    },
    "dead zone": lambda n: (
        gpu.deadzone_sample(BLOCK, normal(), normal(1)[:2], 1000 * n),
        gpu.deadzone_dither(BLOCK, normal(), normal(1)[:2], KEY >> (63 * (n == 1)), normal()),
        gpu.deadzone_encode(BLOCK, normal(), True, normal(1)[:2], (100 + n, 3, n), 100 * n + 7, dead_zones(n)[0]),
        gpu.deadzone_decode(BLOCK, dead_zones(n), 100 * n + 7, normal(), 1 / n),
    ),
    "subspaces": lambda n: (
        gpu.split_rows(rows(n), Compensated(normal(), normal(1), 1.0 / n), thin(n)[:, :n], thin(n)[:, :7], normal()),
        gpu.add_product(rows(n), thin(n)[:, :7].contiguous(), thin(n)[:, :n].contiguous(), normal(), normal()),
        gpu.combine_rows(rows(n), thin(n)[:, :7].contiguous(), normal(), thin(n)[:, :n].contiguous()),
    ),
    "accumulate": lambda n: gpu.accumulate(BLOCK, normal(), normal(1), 1.0 / n, 0.3),
    "narrow": lambda n: gpu.narrow(BLOCK, normal(), normal().bfloat16(), KEY >> (63 * (n == 1))),
    "checksums": lambda n: gpu.checksums(torch.zeros(n, 16 * n, dtype=torch.int32), torch.zeros(n, dtype=torch.int64)),
    "randomk": lambda n: gpu.randomk_positions(BLOCK, counts_of(BLOCK, 0.1 / n), positions(2000), KEY),
    "gather": lambda n: gpu.gather(BLOCK, normal(), positions(n), normal()[n:]),
    "scatter_sum": lambda n: gpu.scatter_sum(
        BLOCK, positions(n)[None].repeat(n + 1, 1), normal()[: n * (n + 1)].view(n + 1, n), normal(), 1 / n
    ),
    "one row": lambda n: gpu.scatter_sum(BLOCK, positions(n)[None], normal()[n : 2 * n][None], normal(), 1 / n),
    "elias_fano": lambda n: (
        gpu.elias_fano_encode(positions(16 * n), BLOCK.positions, packed(16 * n)),
        gpu.elias_fano_decode(packed(16 * n), BLOCK.positions, positions(16 * n)),
    ),
    "topk": lambda n: gpu.topk_select(
        BLOCK, Compensated(normal(), normal(1), 0.9 / n), counts_of(BLOCK, 0.1 / n), positions(1000)[n - 1 :], normal()
    ),
    "write_product": lambda n: gpu.write_product(matrix(16 * n), thin(n), thin(n), normal(), None),
}


@pytest.mark.parametrize("call", VARIED)
def test_values_and_places_compile_nothing_anew(call: str) -> None:
    """Numbers, also 1, which Triton takes for a constant, sizes, and where in a payload something lies."""
    variants = []
    with a_driver() as driver:
        for n in (5, 1, 2, 3):
            with suppress(PayloadError):  # nothing runs, nothing is decoded
                VARIED[call](n)
            variants.append(driver.variants)
    assert variants == [max(variants[0], 1)] * 4


@triton.jit
def _any(values, number, ADD: tl.constexpr, TWICE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(values, number * (1 + TWICE) + ADD)


def test_what_is_started_by_itself_is_what_triton_would_have_compiled() -> None:
    """Also where a number becomes 1, a multiple of 16 or a long one, and where values lie elsewhere or are others."""
    numbers = (3, 5, 1, 16, 2**31 - 1, -(2**31), 2**31, 2**40, -(2**63), 2**63, -1, -(2**31) - 1, 0)
    numbers += (0.5, 1.0, True, False)
    started = []
    for keeps in (True, False):
        _any.device_caches.clear()
        with a_driver() as driver:
            for values in (normal(), normal()[1:], normal()[4:], normal().half(), normal().half()[1:]):
                for number in (*numbers, *numbers):
                    if not keeps:
                        _launch._compiled.clear()
                    _launch.launch(_any, 1, values, number, ADD=True, TWICE=False)
                    _launch.launch(_any, 1, values, number, TWICE=True, ADD=False)
            started.append([(each.specialized, each.arguments[1:]) for each in driver.launches])
    assert started[0] == started[1]
