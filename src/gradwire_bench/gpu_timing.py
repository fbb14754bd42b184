"""Seconds of a device, by its own clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from gradwire_bench import placement

AHEAD = 2_000_000
"""Cycles of the device's clock, a millisecond: more than the launches of a kernel take."""

COLD = 2**28
"""Bytes that are overwritten before each call: more than any cache holds."""


def seconds(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median of calls by events, each with a cache that was overwritten before; on the CPU by the host's clock."""
    for _ in range(3):
        run()
    if device.type == "cpu":
        return statistics.median(_by_the_host(run) for _ in range(repeats))
    cold = torch.empty(COLD, dtype=torch.uint8, device=device)
    pairs = []
    for _ in range(repeats):
        cold.zero_()
        before, after = (torch.Event(device, enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD)  # type: ignore[no-untyped-call] # the device begins when the host has launched it all
        before.record()
        run()
        after.record()
        pairs.append((before, after))
    placement.wait(device)
    return 1e-3 * statistics.median(before.elapsed_time(after) for before, after in pairs)


def seconds_in_a_row(run: Callable[[], object], device: torch.device, calls: int, rounds: int = 3) -> float:
    """Median over rounds of the mean of calls in a row, as in a training: what the host takes is in it."""

    def row() -> None:
        for _ in range(calls):
            run()
        placement.wait(device)

    placement.wait(device)
    return statistics.median(_by_the_host(row) for _ in range(rounds)) / calls


def _by_the_host(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun
