"""Where gradients lie: parameters in a flat buffer, and the segments an operator works on.

A *slot* is one parameter's place in a flat gradient buffer. A *block* is what one method call handles: some slots
of one buffer, cut into *segments*. A segment is the scope of one statistic (one scale, one top-k) and consists of
contiguous *runs*. Layer-wise, bucket-wise and entire-model compression differ in where segments end and in nothing
else, so every operator that loops over segments works at each granularity.

Payloads number the elements of a block by *position*: runs one after another, each starting at a multiple of
``ALIGNMENT`` so that one-bit codes start on a byte.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from torch import Tensor

from gradwire.errors import ConfigurationError

ALIGNMENT = 8
"""Every run starts at a multiple of this many positions: one byte of one-bit codes."""

Float32Array = np.ndarray[Any, np.dtype[np.float32]]
Float64Array = np.ndarray[Any, np.dtype[np.float64]]
Int64Array = np.ndarray[Any, np.dtype[np.int64]]
UInt64Array = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a flat buffer.

    Attributes:
        name: The parameter's qualified name, unique in the model.
        shape: The parameter's shape.
        offset: First element in the flat buffer.
    """

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """One past the last element in the flat buffer."""
        return self.offset + self.numel

    @property
    def stream(self) -> int:
        """A 63-bit number for the name, the same on every rank and in every run: it keys random numbers."""
        return int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Granularity:
    """Where segments end.

    Attributes:
        scope: ``"layer"`` (one segment a parameter), ``"bucket"`` (one a DDP bucket), ``"model"`` (one for the whole
            gradient) or ``"block"`` (``size`` consecutive elements of a parameter each).
        size: Elements of a segment, for ``"block"`` only; 0 otherwise.
    """

    scope: Literal["layer", "bucket", "model", "block"]
    size: int = 0

    @classmethod
    def parse(cls, text: str | Granularity) -> Granularity:
        """Reads ``layer``, ``bucket``, ``model`` or ``block:N``.

        Raises:
            ConfigurationError: If ``text`` is none of these.
        """
        if isinstance(text, Granularity):
            return text
        match text:
            case "layer" | "bucket" | "model":
                return cls(text)
            case str() if text.startswith("block:") and text[6:].isdigit() and int(text[6:]) > 0:
                return cls("block", int(text[6:]))
        raise ConfigurationError(
            f"granularity={text!r} is not known; choose 'layer', 'bucket', 'model' or 'block:N' with N >= 1, "
            "for example 'block:512'"
        )

    def __str__(self) -> str:
        return f"block:{self.size}" if self.scope == "block" else self.scope


@dataclass(frozen=True, eq=False)
class Block:
    """The part of a flat buffer that one method call handles, cut into segments.

    The arrays are what kernels read. Runs are sorted by segment, and by position within the block.

    Attributes:
        slots: The parameters the runs lie in.
        runs: ``int64[R, 3]``: start in the flat buffer, length (>= 1), and position of the run's first element.
        segments: ``int64[S + 1]``: segment ``s`` consists of ``runs[segments[s]:segments[s + 1]]``.
        origins: ``int64[R]``: index of the run's first element within its parameter.
        streams: ``uint64[R]``: hash of the parameter's name, which keys the run's random numbers.
        slot_of_run: ``int64[R]``: index in ``slots`` of the run's parameter.
        unit: Elements that stay together when a parameter is cut into shards.
    """

    slots: tuple[Slot, ...]
    runs: Int64Array
    segments: Int64Array
    origins: Int64Array
    streams: UInt64Array
    slot_of_run: Int64Array
    unit: int

    @cached_property
    def numel(self) -> int:
        """Number of elements covered."""
        return int(self.runs[:, 1].sum())

    @cached_property
    def positions(self) -> int:
        """Number of payload positions: ``numel`` plus the gaps that alignment leaves between runs."""
        return 0 if not len(self.runs) else aligned(int(self.runs[-1, 1] + self.runs[-1, 2]))

    @cached_property
    def segment_numels(self) -> Int64Array:
        """``int64[S]``: elements of each segment."""
        ends = np.concatenate(([0], np.cumsum(self.runs[:, 1])))
        return np.diff(ends[self.segments])

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First and one past the last element of each stretch of the buffer that the runs cover without a gap."""
        spans: list[tuple[int, int]] = []
        for start, length, _ in self.runs.tolist():
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], start + length)
            else:
                spans.append((start, start + length))
        return tuple(spans)

    def parts(self, buffer: Tensor) -> list[Tensor]:
        """The stretches of ``buffer`` that the block covers, as views, in order."""
        return [buffer[start:stop] for start, stop in self.spans]

    def divided(self, size: int) -> Block:
        """The same runs, cut into segments of ``size`` elements, a multiple of ``ALIGNMENT``; kept for later."""
        if size not in self._divisions:
            counts = -(-self.runs[:, 1] // size)
            run = np.repeat(np.arange(len(self.runs)), counts)
            first = (np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)) * size
            start, length, position = self.runs[run].T
            self._divisions[size] = replace(
                self,
                runs=np.stack((start + first, np.minimum(length - first, size), position + first), axis=1),
                segments=np.arange(len(run) + 1),
                origins=self.origins[run] + first,
                streams=self.streams[run],
                slot_of_run=self.slot_of_run[run],
            )
        return self._divisions[size]

    @cached_property
    def _divisions(self) -> dict[int, Block]:
        return {}

    @property
    def segment_count(self) -> int:
        """Number of segments."""
        return len(self.segments) - 1

    @classmethod
    def cut(cls, slots: Sequence[Slot], granularity: Granularity) -> Block:
        """Cuts ``slots`` of one flat buffer into the segments of a granularity.

        With ``bucket`` and ``model`` all slots form one segment: what differs is which slots the caller brings.
        """
        pieces = [
            (index, start, min(start + unit, slot.numel))
            for index, slot in enumerate(slots)
            for unit in [granularity.size or max(slot.numel, 1)]
            for start in range(0, slot.numel, unit)
        ]
        one_segment = granularity.scope in ("bucket", "model")
        owners = [0] * len(pieces) if one_segment else range(len(pieces))
        return cls._of_pieces(slots, pieces, owners, granularity.size or ALIGNMENT)

    @classmethod
    def dense(cls, name: str, lengths: Int64Array) -> Block:
        """Segments of the given lengths, one after another in a buffer of their own; those of length 0 are left out."""
        lengths = lengths[lengths > 0]
        starts = np.cumsum(lengths) - lengths
        padded = -(-lengths // ALIGNMENT) * ALIGNMENT
        slot = Slot(name, (int(lengths.sum()),), 0)
        return cls(
            slots=(slot,),
            runs=np.stack((starts, lengths, np.cumsum(padded) - padded), axis=1),
            segments=np.arange(len(lengths) + 1),
            origins=starts,
            streams=np.full(len(lengths), slot.stream, dtype=np.uint64),
            slot_of_run=np.zeros(len(lengths), dtype=np.int64),
            unit=ALIGNMENT,
        )

    @classmethod
    def _of_pieces(
        cls,
        slots: Sequence[Slot],
        pieces: Sequence[tuple[int, int, int]],
        owners: Sequence[int],
        unit: int,
    ) -> Block:
        """Builds the tables from (slot index, first element, one past the last), each with its segment's number."""
        index, first, last = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
        lengths = last - first
        offsets = np.array([slot.offset for slot in slots], dtype=np.int64)
        streams = np.array([slot.stream for slot in slots], dtype=np.uint64)
        padded = -(-lengths // ALIGNMENT) * ALIGNMENT
        runs = np.stack((offsets[index] + first, lengths, np.cumsum(padded) - padded), axis=1)
        _, begins = np.unique(np.asarray(owners, dtype=np.int64), return_index=True)
        return cls(
            slots=tuple(slots),
            runs=np.ascontiguousarray(runs),
            segments=np.append(begins, len(pieces)).astype(np.int64),
            origins=np.ascontiguousarray(first),
            streams=np.ascontiguousarray(streams[index]),
            slot_of_run=np.ascontiguousarray(index),
            unit=unit,
        )

    def shards(self, count: int) -> tuple[Block, ...]:
        """Cuts the block into ``count`` blocks of nearly equal size over the same buffer, one for each owner.

        Every parameter is cut on its own, so who owns an element depends on its parameter and ``count`` alone, never on
        how parameters are bucketed. A segment that crosses a cut becomes a segment in each shard.
        """
        segment_of_run = np.repeat(np.arange(self.segment_count), np.diff(self.segments))
        shards = []
        for shard in range(count):
            pieces, owners = [], []
            for run, (segment, index) in enumerate(zip(segment_of_run, self.slot_of_run, strict=True)):
                numel = self.slots[index].numel
                low, high = shard_bounds(numel, shard, count, self.unit)
                first = int(self.origins[run])
                start, stop = max(first, low), min(first + int(self.runs[run, 1]), high)
                if start < stop:
                    pieces.append((int(index), start, stop))
                    owners.append(int(segment))
            shards.append(Block._of_pieces(self.slots, pieces, owners, self.unit))
        return tuple(shards)

    def packed(self) -> Block:
        """The same block over a buffer of its own, where each run starts at its position."""
        runs = self.runs.copy()
        runs[:, 0] = runs[:, 2]
        present, first, index = np.unique(self.slot_of_run, return_index=True, return_inverse=True)
        last = np.append(first[1:], len(runs))[: len(present)] - 1
        starts, stops = runs[first, 0], runs[last, 0] + runs[last, 1]
        slots = tuple(
            Slot(self.slots[slot].name, (int(stop - start),), int(start))
            for slot, start, stop in zip(present, starts, stops, strict=True)
        )
        return replace(self, slots=slots, runs=runs, slot_of_run=index.astype(np.int64))


def shard_bounds(numel: int, shard: int, count: int, unit: int) -> tuple[int, int]:
    """First and one past the last element of a parameter that ``shard`` of ``count`` owns, in whole units."""
    if numel < unit * count:
        unit = ALIGNMENT
    units = -(-numel // unit)
    return min(shard * units // count * unit, numel), min((shard + 1) * units // count * unit, numel)


def aligned(positions: int) -> int:
    """The next multiple of ``ALIGNMENT``."""
    return -(-positions // ALIGNMENT) * ALIGNMENT


def flat_slots(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[Slot, ...]:
    """Lays named shapes one after another in a flat buffer."""
    slots, offset = [], 0
    for name, shape in shapes:
        slots.append(Slot(name, tuple(shape), offset))
        offset = slots[-1].stop
    return tuple(slots)
