"""Selected coordinates."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradwire.deferred import expect, placed
from gradwire.errors import PayloadError
from gradwire.kernels.compensated import Compensated
from gradwire.kernels.reference._torch import flat_runs, formed, keep
from gradwire.layout import Block, Int64Array
from gradwire.randomness import hash32, mix64, run_keys

FEISTEL_ROUNDS = 6


def topk_select(block: Block, source: Compensated, counts: Int64Array, positions: Tensor, values: Tensor) -> None:
    """The ``counts[s]`` largest magnitudes of each segment: ascending positions and their ``t``.

    Leaves all of ``t`` in the residual: ``subtract`` takes away what the value coding really sent.

    Of equal magnitudes the lowest position goes first.

    A segment with a value that is not finite selects its first positions, with values NaN.
    """
    written = 0
    for segment, count in enumerate(counts.tolist()):
        pieces, places = [], []
        for _, start, stop, position in flat_runs(block, segment):
            t, kept = formed(source, start, stop)
            pieces.append(t)
            places.append(torch.arange(position, position + stop - start, device=t.device))
            keep(kept, t)
        t, place = torch.cat(pieces), torch.cat(places)
        finite = t.isfinite().all()
        largest = t.abs().sort(descending=True, stable=True).indices[:count].sort().values
        chosen = torch.where(finite, largest, torch.arange(count, device=t.device))
        t = torch.where(finite, t, torch.nan)
        positions[written : written + count] = place[chosen]
        values[written : written + count] = t[chosen]
        written += count


def randomk_positions(block: Block, counts: Int64Array, positions: Tensor, key: int) -> None:
    """``counts[s]`` distinct positions of each segment, uniform, from ``key`` alone.

    Element ``j`` of the choice is ``permutation(j)``, a keyed Feistel network over the smallest power of two that is
    not below the segment's number of elements, applied again while it leads out of the segment. The key is that of the
    segment's first run, mixed with the run's origin. Positions come in the order of ``j``.
    """
    keys = run_keys(key, block.streams)
    written = 0
    for segment, count in enumerate(counts.tolist()):
        first = int(block.segments[segment])
        segment_key = mix64(int(keys[first]) ^ int(block.origins[first]))
        numel = int(block.segment_numels[segment])
        elements = torch.arange(count, device=positions.device)
        elements = _permuted(elements, numel, segment_key)
        while (outside := elements >= numel).any():
            elements[outside] = _permuted(elements[outside], numel, segment_key)
        places = torch.cat(
            [
                torch.arange(position, position + stop - start, device=positions.device)
                for _, start, stop, position in flat_runs(block, segment)
            ]
        )
        positions[written : written + count] = places[elements]
        written += count


def _permuted(elements: Tensor, numel: int, key: int) -> Tensor:
    """A keyed permutation of the cells of a nearly square table with at least ``numel`` cells.

    Row and column take turns: each is shifted cyclically by a hash of the other, under a key of its own each round.
    """
    width = math.isqrt(numel - 1) + 1
    height = -(-numel // width)
    row, column = elements // width, elements % width
    for _ in range(FEISTEL_ROUNDS // 2):
        key = mix64(key)
        row = (row + (hash32(key, column) * height >> 32)) % height
        key = mix64(key)
        column = (column + (hash32(key, row) * width >> 32)) % width
    permuted: Tensor = row * width + column
    return permuted


def _places(block: Block, positions: Tensor) -> Tensor:
    """The elements of the flat buffer at ``positions``; what stands for one that lies in no run lies in some.

    Raises:
        PayloadError: If a position lies in no run; on a device a step later.
    """
    if not positions.numel():
        return positions
    runs = placed(block.runs, positions.device)
    if not len(runs):
        raise lies_in_no_run(block, int(positions[0]))
    run = torch.searchsorted(runs[:, 2].contiguous(), positions, right=True) - 1
    offset = positions - runs[:, 2][run]
    bad = (run < 0) | (offset >= runs[:, 1][run])
    expect(~bad.any(), lambda: lies_in_no_run(block, int(positions[bad][0])))
    return torch.where(bad, runs[0, 0], runs[:, 0][run] + offset)


def lies_in_no_run(block: Block, position: int) -> PayloadError:
    """The error for a position that no encoder of the block can have chosen."""
    return PayloadError(
        f"position {position} lies in no run of the block: positions are below {block.positions} and not in the gaps "
        "that alignment leaves between runs; was it encoded with another configuration?"
    )


def gather(block: Block, source: Tensor, positions: Tensor, values: Tensor) -> None:
    """``values[j] = source`` at ``positions[j]``."""
    values.copy_(source[_places(block, positions)])


def subtract(block: Block, residual: Tensor, positions: Tensor, values: Tensor) -> None:
    """``residual -= values`` at ``positions``; values that are not finite count as not sent.

    Positions are distinct.
    """
    places = _places(block, positions)
    residual[places] = torch.where(values.isfinite(), residual[places] - values, residual[places])


def scatter(block: Block, target: Tensor, positions: Tensor, values: Tensor) -> None:
    """``target = values`` at ``positions``, but where these are NaN. Positions are distinct."""
    places = _places(block, positions)
    target[places] = torch.where(values.isnan(), target[places], values)


def scatter_sum(
    block: Block,
    positions: Tensor,
    values: Tensor,
    out: Tensor,
    weight: float,
    filled: Int64Array | None = None,
) -> None:
    """``out = weight * sum over rows`` of sparse rows ``positions[n, K]``, ``values[n, K]``; zero elsewhere.

    With ``filled`` only the first ``filled[n]`` entries of each row count.

    The positions of a row are distinct.

    Raises:
        PayloadError: If a position lies in no run; nothing has been written then, but on a device.
    """
    counts = [positions.shape[1]] * len(positions) if filled is None else filled.tolist()
    places = [_places(block, row[:count]) for row, count in zip(positions, counts, strict=True)]
    for start, length, _ in block.runs.tolist():
        out[start : start + length] = 0
    for place, row in zip(places, values, strict=True):
        out[place] = out[place] + row[: len(place)]
    for start, length, _ in block.runs.tolist():
        out[start : start + length] *= weight


def scatter_mean(block: Block, positions: Tensor, values: Tensor, out: Tensor) -> None:
    """``out`` = the mean over those sparse rows, ascending each, that have the position; zero elsewhere.

    Raises:
        PayloadError: If a position lies in no run; nothing has been written then.
    """
    places = [_places(block, row) for row in positions]
    senders = torch.zeros_like(out)
    for start, length, _ in block.runs.tolist():
        out[start : start + length] = 0
    for place, row in zip(places, values, strict=True):
        out[place] = out[place] + row
        senders[place] += 1
    for start, length, _ in block.runs.tolist():
        out[start : start + length] /= senders[start : start + length].clamp(min=1)
