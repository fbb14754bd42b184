"""Runs of zeros in packed trits, shortened as in 3LC: what is saved depends on the data.

The paper's text and its authors' code were not at hand. Bytes are those of an independent public implementation in
NumPy, lengths also those of Google's in TensorFlow Federated: runs of 2 to 14 are bytes 243 to 255, longer ones are cut
into runs of 14 first, and a single byte 121 stays. There the first digit of a byte is the highest one, here the lowest;
that changes no length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.deferred import Count
from gradwire.errors import PayloadError

ZEROS = 121
"""Five zeros: the byte that runs are made of."""

SHORTEST_RUN = 2
LONGEST_RUN = 14

RUNS = 243
"""The first byte that stands for a run, the shortest: packed trits are smaller."""


def zero_runs_encode(trits: Tensor, coded: Tensor, room: int) -> Count:
    """Writes packed trits with their runs of zeros shortened to ``coded``, of at least their size.

    Of the first ``room`` bytes those that are not needed are 0 then.

    Returns how many bytes that took; PayloadError if a byte is not five trits.
    """
    shorter: list[int] = []
    run = 0
    for byte in [*trits.tolist(), None]:
        if byte == ZEROS:
            run += 1
            continue
        shorter += [RUNS + LONGEST_RUN - SHORTEST_RUN] * (run // LONGEST_RUN)
        rest = run % LONGEST_RUN
        shorter += [RUNS + rest - SHORTEST_RUN] if rest >= SHORTEST_RUN else [ZEROS] * rest
        run = 0
        if byte is not None:
            if byte >= RUNS:
                raise PayloadError(f"byte {byte} is not five trits: it must be below {RUNS}")
            shorter.append(byte)
    coded[len(shorter) : room] = 0
    coded[: len(shorter)] = torch.tensor(shorter, dtype=torch.uint8)
    return torch.tensor(len(shorter), device=coded.device)


def zero_runs_decode(coded: Tensor, used: Count, trits: Tensor) -> Count:
    """Reads the first ``used`` bytes to ``trits``, whose rest is zeros then, and returns how many bytes that made.

    PayloadError, and nothing written, unless an encoder can have written it, and has for no more than ``trits``.
    """
    longer: list[int] = []
    ended = True
    for byte in coded[: int(used)].tolist():
        zeros = 1 if byte == ZEROS else max(byte - RUNS + SHORTEST_RUN, 0) if byte >= RUNS else 0
        if zeros and not ended:
            raise PayloadError("the bytes of a run of zeros are not the fewest")
        longer += [ZEROS] * zeros or [byte]
        ended = not 0 < zeros < LONGEST_RUN
    if len(longer) > trits.numel():
        raise PayloadError(f"the bytes decode to {len(longer)} bytes of trits, more than {trits.numel()}")
    trits.fill_(ZEROS)
    trits[: len(longer)] = torch.tensor(longer, dtype=torch.uint8)
    return torch.tensor(len(longer), device=trits.device)
