"""float32 values kept in half the bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.cpu._compiled import UInt32Array, array, compiled, halves, hash32
from gradwire.kernels.parts import Part, of_runs, side_by_side
from gradwire.kernels.reference.narrow import INFINITE_BITS, LOW_BITS
from gradwire.layout import Block, Int64Array, UInt64Array
from gradwire.randomness import run_keys

UInt16Array = np.ndarray[Any, np.dtype[np.uint16]]


def narrow(block: Block, values: Tensor, kept: Tensor, key: int) -> None:
    words, halves = array(values).view(np.uint32), kept.view(torch.int16).numpy().view(np.uint16)

    def narrow_part(part: Part) -> None:
        _narrow(part.block.runs, part.block.origins, run_keys(key, part.block.streams), words, halves)

    side_by_side(narrow_part, of_runs(block))


@compiled
def _narrow(runs: Int64Array, origins: Int64Array, keys: UInt64Array, words: UInt32Array, kept: UInt16Array) -> None:
    """Adds random bits below the last one that stays, then cuts; what would become infinite is only cut."""
    for run in range(len(runs)):
        start, length = runs[run, 0], runs[run, 1]
        low_key, high_key = halves(keys[run])
        origin = np.uint32(origins[run])
        own, cut = words[start : start + length], kept[start : start + length]
        for i in range(own.size):
            drawn = np.uint32(hash32(low_key, high_key, np.uint32(origin + np.uint32(i))) & np.uint32(LOW_BITS))
            up = np.uint32(np.uint32(own[i] + drawn) >> np.uint32(16))
            down = np.uint32(own[i] >> np.uint32(16))
            cut[i] = np.uint16(down if np.uint32(up & np.uint32(0x7FFF)) == np.uint32(INFINITE_BITS) else up)
