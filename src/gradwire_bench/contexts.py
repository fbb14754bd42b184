"""What a coder of dead-zone levels would gain by knowing more: ideal adaptive code lengths beside what is sent.

``python -m gradwire_bench.contexts`` prints a table for recorded gradients under error feedback. A context buys
something only if its code length is shorter than that of the activity along memory, which the codec goes by.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from scipy.signal import lfilter
from scipy.special import gammaln
from torch import Tensor

from gradwire import roundtrip
from gradwire.layout import Slot
from gradwire_bench.gradients import Recording, real_gradients
from gradwire_bench.terminal import table
from gradwire_bench.workloads import WORKLOADS, Name

Levels = npt.NDArray[np.int64]

BITS = (0.02, 0.1, 0.5, 2.0)
"""Rates of the codec whose steps are tried."""

MOMENTS = (3, 60, 400)
"""Steps into training."""

STEPS = 4
"""Gradients that went into the memory before; the last of them made the levels of the step before."""

THRESHOLD = 11 / 16

LARGEST = 15
"""Levels from here on are one symbol; what they are exactly takes as many bits under every context."""

RANKS = (1, 4)


def quantised(values: Tensor, step: float) -> Levels:
    """Levels with their signs."""
    relative = values.double().numpy() / step
    return np.where(
        np.abs(relative) < THRESHOLD, 0, np.sign(relative) * np.maximum(np.rint(np.abs(relative)), 1)
    ).astype(np.int64)


def code_length(symbols: Levels, contexts: Levels) -> float:
    """Bits that adaptive arithmetic coding takes: a Dirichlet prior of a half for each symbol, learning included."""
    width = LARGEST + 1
    counts = np.bincount(contexts * width + symbols, minlength=width * (int(contexts.max()) + 1)).reshape(-1, width)
    totals = counts.sum(1)
    nats = (gammaln(totals + width / 2) - gammaln(width / 2)) - (gammaln(counts + 0.5) - gammaln(0.5)).sum(1)
    return float(nats.sum() / np.log(2))


def binned(activity: npt.NDArray[np.float64], bins: int) -> Levels:
    """Four classes an octave, the least one for zero."""
    with np.errstate(divide="ignore"):
        found = np.where(activity > 0, 40 + np.floor(2 * np.log2(activity)), 0)
    return np.clip(found, 0, bins - 1).astype(np.int64)


def before(levels: Levels) -> npt.NDArray[np.float64]:
    """The running mean of magnitudes before each value, over about sixteen."""
    heard = lfilter([1 / 16], [1, -15 / 16], np.abs(levels).astype(float))
    return np.concatenate(([0.0], heard[:-1]))


def contexts(layers: Sequence[tuple[Levels, Levels]]) -> dict[str, list[Levels]]:
    """Contexts by name, for each layer's levels and those of the step before, as matrices."""
    found: dict[str, list[Levels]] = {}
    for number, (levels, last) in enumerate(layers):
        along = binned(before(levels.ravel()), 64)
        above = np.minimum(np.abs(np.vstack((np.zeros_like(levels[:1]), levels[:-1]))), 2).ravel()
        sides = np.abs(last).astype(float)
        sides[:, 1:] += np.abs(last[:, :-1]) / 2
        sides[:, :-1] += np.abs(last[:, 1:]) / 2
        column = (
            np.vstack((np.zeros_like(levels[:1]), np.cumsum(np.abs(levels), 0)[:-1]))
            / np.maximum(np.arange(len(levels)), 1)[:, None]
        )
        told = {
            "layer": np.full(levels.size, number),
            "before": along,
            "+ row above": along * 3 + above,
            "+ column": along * 16 + binned(column.ravel(), 64) // 4,
            "+ last step": along * 16 + binned(sides.ravel(), 64) // 4,
        }
        for name, each in told.items():
            found.setdefault(name, []).append(each)
    return found


def cut(levels: Levels, slots: Sequence[Slot]) -> list[Levels]:
    """The levels of each parameter as a matrix."""
    parts = np.split(levels, [slot.stop for slot in slots[:-1]])
    return [part.reshape(slot.shape[0], -1) for part, slot in zip(parts, slots, strict=True)]


def ideal(levels: Levels, context: Sequence[Levels]) -> float:
    """Bits of all levels, their signs included."""
    symbols = np.minimum(np.abs(levels), LARGEST)
    return code_length(symbols, np.concatenate(list(context))) + float((symbols > 0).sum())


def step_of(values: Tensor, error: float) -> float:
    """The step of a dead-zone quantiser that leaves a squared error."""
    low, high = 1e-12, 64 * float(values.abs().max())
    for _ in range(60):
        middle = (low * high) ** 0.5
        left = values - torch.from_numpy(quantised(values, middle) * middle).float()
        low, high = (middle, high) if float(left.square().sum()) < error else (low, middle)
    return low


def low_rank(values: Tensor, slots: Sequence[Slot], rank: int) -> tuple[Tensor, float]:
    """The best approximation of each layer, and the bits of its factors in bfloat16."""
    found, bits = [], 0.0
    for slot in slots:
        matrix = values[slot.offset : slot.stop].view(slot.shape[0], -1)
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        left, right = (u[:, :rank] * s[:rank]).bfloat16().float(), v[:rank].bfloat16().float()
        found.append((left @ right).flatten())
        bits += 16 * min(rank, len(s)) * sum(matrix.shape)
    return torch.cat(found), bits


def tried(recording: Recording, rate: float) -> dict[str, float]:
    """Bits a value by what the coder knows, all at the error of the codec at a rate."""
    slots, memory, steps = recording.slots, torch.zeros_like(recording.values), []
    for each in (recording.values, *recording.others):
        values = each + memory
        trip = roundtrip(values.view(1, -1), "deadzone", bits=rate, memory="none")
        memory = values - trip.decoded.flatten()
        error = float(memory.square().sum())
        steps.append(quantised(values, step_of(values, error)))
    *_, previous, last = steps
    count = values.numel()
    layers = list(zip(cut(last, slots), cut(previous, slots), strict=True))
    found = {"sent": 8 * trip.wire_bytes / count}
    found |= {name: ideal(last, each) / count for name, each in contexts(layers).items()}
    for rank in RANKS:
        approximation, factors = low_rank(values, slots, rank)
        rest = values - approximation
        levels = quantised(rest, step_of(rest, error))
        told = contexts(list(zip(cut(levels, slots), cut(previous, slots), strict=True)))["before"]
        found[f"rank {rank}"] = (ideal(levels, told) + factors) / count
    return found


def main(names: Sequence[Name]) -> None:
    """Prints the table."""
    console = Console()
    rows: list[tuple[str, dict[str, float]]] = []
    for name in names:
        workload: Any = WORKLOADS[name]
        source = workload.locate("auto")
        for moment in MOMENTS:
            recording = Recording.of(name, real_gradients(source, STEPS, moment, workload=workload))
            for rate in BITS:
                with console.status(f"{name}, {moment} steps in, {rate} bits"):
                    rows.append((f"{name} {moment}, {rate}", tried(recording, rate)))
    shown = table("bits a value at the same error", "gradients, bits", *rows[0][1])
    for label, found in rows:
        shown.add_row(label, *(f"{bits:.3g}" for bits in found.values()))
    console.print(shown)


if __name__ == "__main__":
    main(sys.argv[1:] or ["image", "language", "gpt"])  # type: ignore[arg-type]
