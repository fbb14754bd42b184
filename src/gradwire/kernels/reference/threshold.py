"""Coordinates that reach a threshold, however many they are."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.reference._torch import draws, flat_runs, formed, keep, keep_all, pieces_of
from gradwire.layout import Block, Float32Array, Int64Array
from gradwire.randomness import run_keys

LARGEST = float(np.finfo(np.float32).max)
"""What second moments are cut at, so that they stay finite."""


def collect_reaching(
    block: Block, source: Compensated, thresholds: Float32Array, room: int
) -> tuple[Tensor, Tensor, Int64Array]:
    """All ``t`` but zeros whose magnitude reaches the threshold of their segment; leaves ``t`` in the residual.

    Args:
        block: Which elements, in which segments.
        source: What ``t`` is made of.
        thresholds: ``float32[S]``; NaN for a segment of which nothing is to be chosen.
        room: How many are expected.

    Returns:
        Ascending positions; their values; how many of each run, or -1 for runs of a segment with threshold NaN or
        with a ``t`` that is not finite.
    """
    chosen = _Chosen(block, source.gradient.device)
    for segment, threshold in enumerate(thresholds.tolist()):
        finite = True
        for run, start, stop, position in flat_runs(block, segment):
            t, kept = formed(source, start, stop)
            finite = finite and bool(t.isfinite().all())
            chosen.add(run, position, t, (t.abs() >= threshold) & (t != 0))
            keep(kept, t)
        if math.isnan(threshold) or not finite:
            chosen.reject(segment)
    return chosen.all()


def collect_drawn(
    block: Block, source: Compensated, thresholds: Float32Array, room: int, key: int
) -> tuple[Tensor, Tensor, Int64Array]:
    """As :meth:`collect_reaching`, each ``t`` against its own share of the threshold, drawn from [0, 1): all above it.

    A magnitude is chosen with as much of a chance as it has of the threshold.
    """
    chosen, keys = _Chosen(block, source.gradient.device), run_keys(key, block.streams).tolist()
    for segment, threshold in enumerate(thresholds):
        pieces = pieces_of(block, segment, source)
        if np.isnan(threshold) or not all(bool(t.isfinite().all()) for *_, t, _ in pieces):
            chosen.reject(segment)
        else:
            for piece in pieces:
                shares = (draws(block, keys, piece) >> 8).float() * 2.0**-24
                chosen.add(piece.run, piece.span.start, piece.t, piece.t.abs() > shares * float(threshold))
        keep_all(pieces)
    return chosen.all()


def collect_unambiguous(
    block: Block,
    source: Compensated,
    squares: Tensor | None,
    moments: Tensor,
    alpha: float,
    decay: float,
    threshold: float,
    room: int,
) -> tuple[Tensor, Tensor, Int64Array]:
    """All ``t`` with ``t**2 > alpha * v`` and ``|t| > threshold``, after ``v = moments + squares``.

    Leaves ``t`` in the residual and ``v`` in ``moments``, times ``decay`` where not chosen; neither takes in what
    is not finite. ``squares`` are zeroed; None stands for the gradient's. Otherwise as :meth:`collect_reaching`.
    """
    chosen = _Chosen(block, source.gradient.device)
    for segment in range(block.segment_count):
        finite = True
        for run, start, stop, position in flat_runs(block, segment):
            t, kept = formed(source, start, stop)
            whole = t.isfinite()
            finite = finite and bool(whole.all())
            square = source.gradient[start:stop].square() if squares is None else squares[start:stop]
            summed = moments[start:stop] + square
            v = torch.where(whole & ~summed.isnan(), summed.clamp(max=LARGEST), moments[start:stop])
            wanted = whole & (t.double().square() > alpha * v.double()) & (t.abs() > float(np.float32(threshold)))
            moments[start:stop] = torch.where(whole & ~wanted, v * decay, v)
            if squares is not None:
                square.zero_()
            chosen.add(run, position, t, wanted)
            keep(kept, t)
        if not finite:
            chosen.reject(segment)
    return chosen.all()


def collect_local_maxima(
    block: Block, source: Compensated, bins: Int64Array, room: int
) -> tuple[Tensor, Tensor, Int64Array, Float32Array]:
    """All ``t`` but zeros with ``|t + gamma * gradient|`` at least the largest ``|t|`` of their bin.

    Bins are ``bins[R]`` consecutive elements of a run, the last one perhaps fewer. Leaves ``t`` in the residual.
    Otherwise as :meth:`collect_unambiguous`, and with the mean over bins of that largest ``|t|`` of each segment.
    """
    chosen = _Chosen(block, source.gradient.device)
    scales = np.zeros(block.segment_count, dtype=np.float32)
    for segment in range(block.segment_count):
        total, count, finite = 0.0, 0, True
        for run, start, stop, position in flat_runs(block, segment):
            t, kept = formed(source, start, stop)
            ahead = t + source.gradient[start:stop] * (1.0 if kept is None else source.gamma)
            finite = finite and bool(t.isfinite().all())
            width = int(bins[run])
            many = -(-len(t) // width)
            largest = torch.nn.functional.pad(t.abs(), (0, many * width - len(t))).view(many, width).amax(1)
            of_bin = largest.repeat_interleave(width)[: len(t)]
            for each in largest.tolist():
                total += each
            count += many
            chosen.add(run, position, t, (ahead.abs() >= of_bin) & (t != 0))
            keep(kept, t)
        if finite:
            scales[segment] = total / count
        else:
            chosen.reject(segment)
    positions, values, counts = chosen.all()
    return positions, values, counts, scales


class _Chosen:
    """Positions and values that add up run by run, until a segment turns out not to be finite."""

    def __init__(self, block: Block, device: torch.device) -> None:
        self._block = block
        self._counts = np.zeros(len(block.runs), dtype=np.int64)
        self._positions = [torch.empty(0, dtype=torch.int64, device=device)] * len(block.runs)
        self._values = [torch.empty(0, device=device, dtype=torch.float32)] * len(block.runs)

    def add(self, run: int, position: int, values: Tensor, wanted: Tensor) -> None:
        places = wanted.nonzero().flatten()
        self._counts[run] = len(places)
        self._positions[run] = places + position
        self._values[run] = values[places]

    def reject(self, segment: int) -> None:
        for run in range(*self._block.segments[segment : segment + 2].tolist()):
            self._counts[run] = -1
            self._positions[run] = self._positions[run][:0]
            self._values[run] = self._values[run][:0]

    def all(self) -> tuple[Tensor, Tensor, Int64Array]:
        if not self._positions:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float32), self._counts
        return torch.cat(self._positions), torch.cat(self._values), self._counts
