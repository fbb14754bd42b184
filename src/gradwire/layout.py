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
from itertools import pairwise
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.granularity import Granularity as Granularity

ALIGNMENT = 8
"""Every run starts at a multiple of this many positions: one byte of one-bit codes."""

GRADIENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Of gradients; in flat buffers they are float32."""

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
        part: Which part of the parameter it is, in words; empty for all of it.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    part: str = ""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """One past the last element in the flat buffer."""
        return self.offset + self.numel

    @cached_property
    def stream(self) -> int:
        """A 63-bit number for name and part, the same on every rank and in every run: it keys random numbers."""
        return (
            int.from_bytes(hashlib.blake2b(f"{self.name}{self.part}".encode(), digest_size=8).digest(), "little") >> 1
        )


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
        units: ``int64[len(slots)]``: elements that stay together when a parameter is cut into shards.
    """

    slots: tuple[Slot, ...]
    runs: Int64Array
    segments: Int64Array
    origins: Int64Array
    streams: UInt64Array
    slot_of_run: Int64Array
    units: Int64Array

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
        starts, stops = self.runs[:, 0], self.runs[:, 0] + self.runs[:, 1]
        breaks = np.flatnonzero(starts[1:] != stops[:-1]) + 1
        edges = np.concatenate(([0], breaks)) if len(starts) else breaks
        last = np.append(edges[1:], len(starts))[: len(edges)] - 1
        return tuple(zip(starts[edges].tolist(), stops[last].tolist(), strict=True))

    def parts(self, buffer: Tensor) -> list[Tensor]:
        """The stretches of ``buffer`` that the block covers, as views, in order."""
        return [buffer[start:stop] for start, stop in self.spans]

    def segmented(self, buffer: Tensor) -> list[Tensor]:
        """The values of each segment; a view where that is one run."""
        runs = [buffer[start : start + length] for start, length, _ in self.runs.tolist()]
        pieces = [runs[first:last] for first, last in pairwise(self.segments.tolist())]
        return [each[0] if len(each) == 1 else torch.cat(each) for each in pieces]

    def divided(self, size: int) -> Block:
        """The same runs, cut into segments of ``size`` elements, a multiple of ``ALIGNMENT``; kept for later."""
        if size not in self._divisions:
            run, piece = _pieces(-(-self.runs[:, 1] // size))
            first = piece * size
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
        numels = np.array([slot.numel for slot in slots], dtype=np.int64)
        sizes = np.array([granularity.segment(slot.shape) for slot in slots], dtype=np.int64)
        index, piece = _pieces(-(-numels // sizes))
        first = piece * sizes[index]
        last = np.minimum(first + sizes[index], numels[index])
        segments = np.zeros_like(index) if granularity.joins else np.arange(len(index))
        units = np.array([granularity.unit(slot.shape) or ALIGNMENT for slot in slots], dtype=np.int64)
        return cls._of_pieces(slots, index, first, last, segments, units)

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
            units=np.array([ALIGNMENT], dtype=np.int64),
        )

    @classmethod
    def _of_pieces(
        cls,
        slots: Sequence[Slot],
        index: Int64Array,
        first: Int64Array,
        last: Int64Array,
        segment: Int64Array,
        units: Int64Array,
    ) -> Block:
        """Builds the tables from each piece's slot, first element, one past its last, and its segment, ascending."""
        lengths = last - first
        offsets = np.array([slot.offset for slot in slots], dtype=np.int64)
        streams = np.array([slot.stream for slot in slots], dtype=np.uint64)
        padded = -(-lengths // ALIGNMENT) * ALIGNMENT
        runs = np.stack((offsets[index] + first, lengths, np.cumsum(padded) - padded), axis=1)
        return cls(
            slots=tuple(slots),
            runs=np.ascontiguousarray(runs),
            segments=np.append(np.flatnonzero(np.diff(segment, prepend=-1)), len(index)),
            origins=np.ascontiguousarray(first),
            streams=np.ascontiguousarray(streams[index]),
            slot_of_run=np.ascontiguousarray(index),
            units=units,
        )

    def shards(self, count: int) -> Owned:
        """Cuts the block into ``count`` blocks of nearly equal size over the same buffer, one for each owner.

        Every parameter is cut on its own, so who owns an element depends on its parameter and ``count`` alone, never on
        how parameters are bucketed. A segment that crosses a cut becomes a segment in each shard.
        """
        numels = np.array([slot.numel for slot in self.slots], dtype=np.int64)[self.slot_of_run]
        units, stops = self.units[self.slot_of_run], self.origins + self.runs[:, 1]
        least = shard_of(self.origins, numels, count, units)
        run, further = _pieces(shard_of(stops - 1, numels, count, units) - least + 1)
        owner = least[run] + further
        low, high = shard_bounds(numels[run], owner, count, units[run])
        first, last = np.maximum(self.origins[run], low), np.minimum(stops[run], high)
        some = np.flatnonzero(first < last)
        order = some[np.argsort(owner[some], kind="stable")]
        run, owner = run[order], owner[order]
        segment = owner * self.segment_count + np.repeat(np.arange(self.segment_count), np.diff(self.segments))[run]
        whole = Block._of_pieces(self.slots, self.slot_of_run[run], first[order], last[order], segment, self.units)
        return Owned(whole, np.searchsorted(owner, np.arange(count + 1)))

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
        return replace(self, slots=slots, runs=runs, slot_of_run=index.astype(np.int64), units=self.units[present])


class Owned(Sequence[Block]):
    """What owners have of a block, each a block that is made when it is first asked for: there may be thousands.

    Args:
        whole: All of them, one after another, each of whole segments.
        edges: ``int64[n + 1]``: owner ``i`` has ``whole.runs[edges[i]:edges[i + 1]]``.
    """

    def __init__(self, whole: Block, edges: Int64Array) -> None:
        self._whole = whole
        self._edges = edges
        self._made: dict[int, Block] = {}

    def __len__(self) -> int:
        return len(self._edges) - 1

    @overload
    def __getitem__(self, owner: int) -> Block: ...

    @overload
    def __getitem__(self, owner: slice) -> tuple[Block, ...]: ...

    def __getitem__(self, owner: int | slice) -> Block | tuple[Block, ...]:
        if isinstance(owner, slice):
            return tuple(self[each] for each in range(len(self))[owner])
        owner = range(len(self))[owner]
        if owner not in self._made:
            whole, (start, stop) = self._whole, self._edges[owner : owner + 2].tolist()
            first, last = np.searchsorted(whole.segments, (start, stop)).tolist()
            runs = whole.runs[start:stop].copy()
            runs[:, 2] -= runs[:1, 2]
            self._made[owner] = replace(
                whole,
                runs=runs,
                segments=whole.segments[first : last + 1] - start,
                origins=whole.origins[start:stop],
                streams=whole.streams[start:stop],
                slot_of_run=whole.slot_of_run[start:stop],
            )
        return self._made[owner]

    @property
    def different(self) -> tuple[Block, ...]:
        """One of each kind: thousands of owners have some dozens of kinds, whose payloads have the same size.

        Of one kind are those whose runs are as long, of the same parameters and segments, and begin as far into a unit.
        """
        whole = self._whole
        begins = np.isin(np.arange(len(whole.runs)), whole.segments)
        within = whole.origins % whole.units[whole.slot_of_run]
        lies = np.stack((whole.runs[:, 1], whole.slot_of_run, begins, within), axis=1)
        stretches = pairwise(self._edges.tolist())
        kinds = {lies[start:stop].tobytes(): owner for owner, (start, stop) in enumerate(stretches)}
        return tuple(self[owner] for owner in kinds.values())


def shard_bounds(
    numel: int | Int64Array, shard: int | Int64Array, count: int, unit: int | Int64Array
) -> tuple[Int64Array, Int64Array]:
    """First and one past the last element of a parameter that ``shard`` of ``count`` owns, in whole units."""
    unit, units = _cut_by(numel, count, unit)
    return np.minimum(shard * units // count * unit, numel), np.minimum((shard + 1) * units // count * unit, numel)


def shard_of(element: Int64Array, numel: Int64Array, count: int, unit: Int64Array) -> Int64Array:
    """Which of ``count`` shards has an element of a parameter, by :func:`shard_bounds`."""
    unit, units = _cut_by(numel, count, unit)
    return ((element // unit + 1) * count - 1) // units


def _cut_by(numel: int | Int64Array, count: int, unit: int | Int64Array) -> tuple[Int64Array, Int64Array]:
    """Elements that stay together when a parameter is cut among ``count``, and how many times there are as many."""
    unit = np.where(numel < unit * count, ALIGNMENT, unit)
    return unit, -(-numel // unit)


def _pieces(counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Of what is cut into so many pieces each: what each piece is of, and which it is of that."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)


def aligned(positions: int) -> int:
    """The next multiple of ``ALIGNMENT``."""
    return -(-positions // ALIGNMENT) * ALIGNMENT


def flat_slots(shapes: Sequence[tuple[str, tuple[int, ...]]], alignment: int = 1) -> tuple[Slot, ...]:
    """Lays named shapes one after another in a flat buffer, each from a multiple of ``alignment`` elements on."""
    slots, offset = [], 0
    for name, shape in shapes:
        slots.append(Slot(name, tuple(shape), offset))
        offset = -(-slots[-1].stop // alignment) * alignment
    return tuple(slots)


def as_matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The most nearly square matrix that an array is, row by row, without moving a value; vectors stay as they are.

    Torch's first dimension is a layer's outputs, and so a good one for rows. Elsewhere kernels are ``(height, width,
    in, out)`` or ``(in, heads, size)``, of which it would make matrices of three rows.
    """
    if len(shape) < 3:
        return shape
    cut = min(range(1, len(shape)), key=lambda cut: math.prod(shape[:cut]) + math.prod(shape[cut:]))
    return math.prod(shape[:cut]), math.prod(shape[cut:])


def check_tables(model: torch.nn.Module) -> None:
    """Raises ConfigurationError if a table of a model has sparse gradients."""
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            raise ConfigurationError(f"{name or 'the model'} has sparse=True; gradwire averages dense gradients only")
