"""Seconds of a device, by its own clock."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

Told = Callable[[str], None]

AHEAD = 500_000
"""Cycles of the device's clock, a quarter of a millisecond: more than the launches of a kernel take."""


def seconds(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median by events, each call with a cache that was overwritten before."""
    cold = torch.empty(2**28, dtype=torch.uint8, device=device)
    for _ in range(3):
        run()
    pairs = []
    for _ in range(repeats):
        cold.zero_()
        before, after = (torch.Event(device, enable_timing=True) for _ in range(2))
        if device.type == "cuda":
            torch.cuda._sleep(AHEAD)  # type: ignore[no-untyped-call] # the device begins when the host has launched all of it
        before.record()
        run()
        after.record()
        pairs.append((before, after))
    torch.cuda.synchronize(device)
    return 1e-3 * statistics.median(before.elapsed_time(after) for before, after in pairs)
