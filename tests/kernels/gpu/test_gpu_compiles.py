"""Kernels in Triton compile for GPUs that are not here: exactly as they are written, and within registers."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'gradwire[gpu]'")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets here, and compiles nothing", allow_module_level=True)

from compiling import check, compiled

from gradwire.kernels import codes, gpu, payload_bytes
from gradwire.layout import Block, Granularity, Slot
from kernel_inputs import KEY, normal

LONG = Block.cut([Slot("weight", (8192,), 0)], Granularity("layer"))
SMALL = LONG.divided(512)

CODES = {
    "sm_90": (
        codes.Sign(),
        codes.Vote(),
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
    ),
    "sm_80": (codes.Sign(), codes.QSGD(4), codes.Dynamic()),
    "gfx942": (codes.Sign(), codes.QSGD(4), codes.TernGrad()),
}


def check_all(call: Callable[[], object], target: str) -> None:
    seen = [check(kernel, target) for _, kernel in compiled(call, target)]
    assert seen


@pytest.mark.parametrize(("target", "code"), [(target, code) for target, all_of in CODES.items() for code in all_of])
@pytest.mark.parametrize("block", [LONG, SMALL], ids=["long", "small"])
def test_codes_compile(target: str, code: codes.Sign, block: Block) -> None:
    if block is SMALL and target != "sm_90":
        return
    payloads = torch.zeros(2, payload_bytes(code, block), dtype=torch.uint8)
    check_all(lambda: gpu.encode(code, block, normal(), normal(1), 0.9, 1.0, payloads[0], KEY), target)
    check_all(lambda: gpu.decode(code, block, payloads, normal(), 0.5), target)
