"""Two sparse sets into one."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.layout import Int64Array


def merge_top(
    counts: Int64Array,
    first_positions: Tensor,
    first_values: Tensor,
    second_positions: Tensor,
    second_values: Tensor,
    positions: Tensor,
    values: Tensor,
) -> None:
    """The ``counts[s]`` largest magnitudes of the sum of two sparse sets with as many values in each segment ``s``.

    A segment whose sum is not finite has its first positions, with values NaN.

    Of equal magnitudes the lowest position goes first.
    """
    written = 0
    for count in counts.tolist():
        own = slice(written, written + count)
        places, where = torch.unique(torch.cat((first_positions[own], second_positions[own])), return_inverse=True)
        first = torch.full(places.shape, -0.0, device=values.device, dtype=torch.float32)
        second = first.clone()
        first[where[:count]] = first_values[own]
        second[where[count:]] = second_values[own]
        total = first + second
        if total.isfinite().all():
            chosen = total.abs().sort(descending=True, stable=True).indices[:count].sort().values
        else:
            total = torch.full_like(total, torch.nan)
            chosen = torch.arange(count, device=values.device)
        positions[own] = places[chosen]
        values[own] = total[chosen]
        written += count


def survivors(positions: Tensor, kept_positions: Tensor, kept_values: Tensor, flags: Tensor) -> None:
    """Clears the flags, ``bool``, of ascending positions where an ascending set has no finite value."""
    if not len(kept_positions):
        flags.fill_(False)
        return
    where = torch.searchsorted(kept_positions, positions).clamp(max=len(kept_positions) - 1)
    flags &= (kept_positions[where] == positions) & kept_values[where].isfinite()
