"""Checksums of 4-byte words."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.gpu._launch import jitted, launch
from gradwire.kernels.reference._torch import CHUNK


def checksums(words: Tensor, sums: Tensor) -> None:
    sums.zero_()
    pieces = triton.cdiv(words.shape[1], CHUNK)
    launch(_checksums, len(words) * pieces, words, sums, words.shape[1], pieces, WIDTH=CHUNK, warps=8)


@jitted("count", "pieces")
def _checksums(words, sums, count, pieces, WIDTH: tl.constexpr):
    """Integers wrap alike in any order."""
    program = tl.program_id(0)
    row = (program // pieces).to(tl.int64)
    i = (program % pieces).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    word = tl.load(words + row * count + i, mask=i < count, other=0).to(tl.uint32, bitcast=True)
    weight = (2 * i + 1).to(tl.uint32)
    products = word.to(tl.uint64) * weight.to(tl.uint64)
    tl.atomic_add(sums + row, tl.sum(products.to(tl.int64, bitcast=True), axis=0), sem="relaxed")
