"""Runs of zeros in packed trits, shortened."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from gradwire.deferred import Count
from gradwire.errors import PayloadError
from gradwire.kernels.cpu._compiled import UInt8Array, array, compiled
from gradwire.kernels.cpu._instructions import element_pointer, in_all_lanes, intrinsic
from gradwire.kernels.reference.zero_runs import LONGEST_RUN, RUNS, SHORTEST_RUN, ZEROS

_NOT_TRITS = -1
_NOT_FEWEST = -2

_STORE = 16
"""Bytes that are written at once, no fewer than the longest run."""


def zero_runs_encode(trits: Tensor, coded: Tensor, room: int) -> Count:
    used = _encode(array(trits), array(coded))
    if used == _NOT_TRITS:
        raise PayloadError(f"byte {int(trits.max())} is not five trits: it must be below {RUNS}")
    coded[used:room] = 0
    return torch.tensor(used)


def zero_runs_decode(coded: Tensor, used: Count, trits: Tensor) -> Count:
    coded = coded[: int(used)]
    length = _decoded_length(array(coded))
    if length == _NOT_FEWEST:
        raise PayloadError("the bytes of a run of zeros are not the fewest")
    if length > trits.numel():
        raise PayloadError(f"the bytes decode to {length} bytes of trits, more than {trits.numel()}")
    _decode(array(coded), array(trits))
    trits[length:] = ZEROS
    return torch.tensor(length)


@compiled
def _encode(trits: UInt8Array, coded: UInt8Array) -> int:
    for i in range(trits.size):
        if trits[i] >= RUNS:
            return _NOT_TRITS
    read, used = 0, 0
    while read < trits.size:
        if trits[read] != ZEROS:
            coded[used] = trits[read]
            read += 1
        else:
            run = 1
            while run < LONGEST_RUN and read + run < trits.size and trits[read + run] == ZEROS:
                run += 1
            coded[used] = ZEROS if run < SHORTEST_RUN else np.uint8(RUNS + run - SHORTEST_RUN)
            read += run
        used += 1
    return used


@compiled
def _decoded_length(coded: UInt8Array) -> int:
    """How many bytes of trits there are; ``_NOT_FEWEST`` if no encoder wrote this."""
    length, not_fewest, before = np.int64(0), np.int64(0), np.int64(0)
    for i in range(coded.size):
        zeros = _zeros(coded[i])
        not_fewest |= np.int64(zeros > 0) & np.int64(before > 0) & np.int64(before < LONGEST_RUN)
        length += np.int64(max(zeros, 1))
        before = zeros
    return _NOT_FEWEST if not_fewest else int(length)


@compiled
def _decode(coded: UInt8Array, trits: UInt8Array) -> None:
    """Writes more than a run takes, where there is room, because what follows is written later."""
    written = np.int64(0)
    for i in range(coded.size):
        zeros = _zeros(coded[i])
        byte = np.uint8(ZEROS) if zeros else coded[i]
        if written + _STORE <= trits.size:
            put_copies(trits, written, byte)
        else:
            for j in range(max(zeros, 1)):
                trits[written + j] = byte
        written += np.int64(max(zeros, 1))


@intrinsic
def put_copies(typing_context: Any, target: Any, index: Any, byte: Any) -> Any:
    """``target[index:index + _STORE] = byte`` in a contiguous array of bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(8), _STORE)
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1], vector)
        builder.store(in_all_lanes(builder, args[2], vector), pointer, align=1)
        return context.get_dummy_value()

    return types.void(target, types.intp, types.uint8), generate


@compiled
def _zeros(byte: np.uint8) -> np.int64:
    """For how many bytes of zeros one stands."""
    longer = np.int64(byte >= RUNS) * (np.int64(byte) - np.int64(RUNS - SHORTEST_RUN))
    return np.int64(longer + np.int64(byte == ZEROS))
