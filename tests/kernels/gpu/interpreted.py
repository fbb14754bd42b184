"""What the tests of kernels share that run in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed: pip install 'gradwire[gpu]'")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET is not 1: `make test-gpu-kernels`", allow_module_level=True)

import triton.language as tl
from triton.runtime import interpreter

from gradwire.kernels import dispatch, gpu
from gradwire.layout import Block
from kernel_inputs import GRADIENTS, block_of, normal

KINDS = ("normal", "denormals", "huge", "nan", "signed zeros", "one outlier")
LENGTHS = (70, 64, 1, 33, 260, 40)

BLOCKS = {
    "layers of any kind": block_of(LENGTHS),
    "one bucket": block_of((5, 300, 70), "bucket"),
    "small segments": block_of(LENGTHS, "block:64"),
    "a shard": block_of((300, 700)).shards(3)[1],
    "empty": block_of([]),
}
LONG = block_of((4129, 1, 9001), "bucket")


@pytest.fixture(autouse=True, scope="module")
def by_the_gpu() -> Iterator[None]:
    """Calls of kernels run those of the GPU, whatever the device.

    The interpreter makes Triton's language anew in each call of a function that a kernel calls, which takes longer than
    the call; here each launch does so once, for all modules.
    """
    language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    once = partial(interpreter._patch_lang, language)
    with (
        mock.patch.object(interpreter, "_patch_lang", side_effect=lambda _: once()),
        mock.patch.object(interpreter.InterpretedFunction, "__call__", called),
        mock.patch.object(dispatch, "overrides", return_value=vars(gpu)),
        np.errstate(all="ignore"),
    ):
        yield


def called(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function.rewrite()(*args, **kwargs)


def of_all_kinds(block: Block) -> Tensor:
    """Values of another kind in each segment."""
    values = normal(3)
    for segment, (first, last) in enumerate(zip(block.segments[:-1], block.segments[1:], strict=True)):
        source = GRADIENTS[KINDS[segment % len(KINDS)]]
        for start, length, _ in block.runs[first:last].tolist():
            values[start : start + length] = source[:length]
            if source.isnan().any():
                values[start] = torch.nan
    return values
