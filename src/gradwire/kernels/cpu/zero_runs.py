"""Runs of zeros in packed trits, shortened."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.errors import PayloadError
from gradwire.kernels.cpu._compiled import UInt8Array, array, compiled
from gradwire.kernels.reference.zero_runs import LONGEST_RUN, RUNS, SHORTEST_RUN, ZEROS

_NOT_TRITS = -1
_NOT_FEWEST = -2


def zero_runs_encode(trits: Tensor, coded: Tensor) -> int:
    """See :meth:`gradwire.kernels.Kernels.zero_runs_encode`."""
    used = _encode(array(trits), array(coded))
    if used == _NOT_TRITS:
        raise PayloadError(f"byte {int(trits.max())} is not five trits: it must be below {RUNS}")
    return int(used)


def zero_runs_decode(coded: Tensor, trits: Tensor) -> int:
    """See :meth:`gradwire.kernels.Kernels.zero_runs_decode`."""
    length = _decoded_length(array(coded))
    if length == _NOT_FEWEST:
        raise PayloadError("the bytes of a run of zeros are not the fewest")
    if length > trits.numel():
        raise PayloadError(f"the bytes decode to {length} bytes of trits, more than {trits.numel()}")
    _decode(array(coded), array(trits))
    return int(length)


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
    length, ended = 0, True
    for i in range(coded.size):
        zeros = 0
        if coded[i] == ZEROS:
            zeros = 1
        elif coded[i] >= RUNS:
            zeros = int(coded[i]) - RUNS + SHORTEST_RUN
        if zeros and not ended:
            return _NOT_FEWEST
        length += max(zeros, 1)
        ended = zeros == 0 or zeros == LONGEST_RUN
    return length


@compiled
def _decode(coded: UInt8Array, trits: UInt8Array) -> None:
    written = 0
    for i in range(coded.size):
        if coded[i] < RUNS:
            trits[written] = coded[i]
            written += 1
        else:
            for _ in range(np.int64(coded[i]) - RUNS + SHORTEST_RUN):
                trits[written] = ZEROS
                written += 1
