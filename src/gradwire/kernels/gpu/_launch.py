"""How kernels are started: tables of a block's tiles on its device, and one way to launch."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
from torch import Tensor

from gradwire.deferred import placed
from gradwire.kernels.code import Code
from gradwire.kernels.reference._torch import CHUNK
from gradwire.layout import Block, Int64Array

WIDTHS = (512, 1024, CHUNK)
"""Elements that a program has room for: each width compiles anew."""

VECTOR = 4
"""Elements of a 16-byte access."""


class Tiles:
    """Tables of blocks of one buffer on a device, for programs of a tile each: elements of a run, a chunk at most.

    Segments, runs and tiles of several blocks are numbered one block after another; what is said of one block's runs
    below holds where there is only one.

    Attributes:
        table: ``int64[T, 7]``: first element in the flat buffer, number of elements, position, segment, stream and
            counter of the random numbers, block.
        segments: ``int64[S + 1]``: segment ``s`` consists of runs ``segments[s]`` to ``segments[s + 1] - 1``.
        runs: ``int64[R + 1]``: run ``r`` consists of tiles ``runs[r]`` to ``runs[r + 1] - 1``.
        numels: ``int64[S]``: elements of each segment.
        places: ``int64[R, 3]``: the runs: position, number of elements, first element in the flat buffer.
        count: T.
        segment_count: S.
        segment_tiles: ``int64[S]``: tiles of each segment, on the host.
        width: Room for the longest tile, one of ``WIDTHS``.
        whole: Whether every segment is one tile.
        grain: What all positions that tiles begin at are multiples of; 0 if there is none but the first.
        aligned: Whether all tiles begin and end at 16 bytes, if the buffer does.
    """

    def __init__(self, blocks: tuple[Block, ...], device: torch.device) -> None:
        start, length, position = np.concatenate([block.runs for block in blocks]).T
        before, segments, ends = _bounds(blocks)
        run = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
        first = (np.arange(len(run)) - ends[run]) * CHUNK
        numel = np.minimum(CHUNK, length[run] - first)
        streams = np.concatenate([block.streams for block in blocks]).view(np.int64)[run]
        origins = np.concatenate([block.origins for block in blocks])[run] + first
        segment, owner = (np.repeat(np.arange(len(each) - 1), np.diff(each))[run] for each in (segments, before))
        table = np.stack((start[run] + first, numel, position[run] + first, segment, streams, origins, owner), axis=1)
        longest = int(numel.max(initial=0))
        self.count, self.segment_count = len(run), len(segments) - 1
        self.width = next(width for width in WIDTHS if longest <= width)
        self.whole = self.count == self.segment_count
        self.grain = int(np.gcd.reduce(table[:, 2]))
        self.aligned = not (table[:, :2] % VECTOR).any()
        self._block, self._others, self._device = weakref.proxy(blocks[0]), blocks[1:], device
        self._kept: dict[str, tuple[bytes, Tensor]] = {}
        self._payloads: dict[tuple[Code, int], Tensor] = {}
        self.segment_tiles = np.diff(ends[segments])
        self.table = self._moved(table)
        self.numels = self._moved(np.concatenate([block.segment_numels for block in blocks]))

    @property
    def shape(self) -> dict[str, Any]:
        """What kernels over all tiles are compiled for, and started with."""
        return {"WIDTH": self.width, "ALIGNED": self.aligned, "warps": warps(self.width)}

    def payloads(self, code: Code, stride: int) -> Tensor:
        """``int64[B, 3]``: where the payloads of blocks lie that are written by a code in rows so many bytes apart.

        First what is added to a segment's number times its words for the first of them, in words, from the first row
        on; then where the body begins, in bytes, from the first one on; then how far apart bytes of the body are that
        hold more of the same position, or of another one that shares a byte with it.
        """
        if (code, stride) not in self._payloads:
            places, segments, head = [], 0, 0
            for row, block in enumerate((self._block, *self._others)):
                words, size = code.layout.words, code.layout.body(block.positions)
                head = 4 * words * block.segment_count if row == 0 else head
                scales = row * stride // 4 - words * segments if words else 0
                body = row * stride + 4 * words * block.segment_count - head
                places.append((scales, body, min(size, block.positions)))
                segments += block.segment_count
            self._payloads[code, stride] = self._moved(np.array(places))
        return self._payloads[code, stride]

    @cached_property
    def segments(self) -> Tensor:
        """See above; where every segment is one tile nobody asks."""
        return self._moved(_bounds((self._block, *self._others))[1])

    @cached_property
    def runs(self) -> Tensor:
        """The same."""
        return self._moved(_bounds((self._block, *self._others))[2])

    @property
    def steps(self) -> int:
        """Halvings after which a run is found among all."""
        return len(self._block.runs).bit_length()

    @cached_property
    def elements(self) -> Tensor:
        """``int64[R, 2]``: the number of a run's first element within its segment, and its position."""
        _, length, position = self._block.runs.T
        ends = np.cumsum(length)
        segment = np.repeat(np.arange(self._block.segment_count), np.diff(self._block.segments))
        before = np.concatenate(([0], np.cumsum(self._block.segment_numels)))
        return self._moved(np.stack((ends - length - before[segment], position), axis=1))

    def pieces(self, counts: Int64Array, width: int) -> Tensor:
        """``int64[P, 5]``: choices of ``counts[s]`` elements of each segment, in pieces of ``width`` at most.

        Segment, first choice of the piece, number of choices, choices of earlier segments, and the width of a nearly
        square table of the segment's elements. Kept until other numbers are asked for.
        """
        return self.asked(f"pieces of {width}", counts, lambda: self._cut(counts, width))

    @property
    def segment_numels(self) -> Int64Array:
        """``int64[S]``: elements of each segment, on the host."""
        numels: Int64Array = self._block.segment_numels
        return numels

    def wanted(self, counts: Int64Array) -> Tensor:
        """``int64[S, 2]``: ``counts[s]``, and their sum over earlier segments; kept as :meth:`pieces` are."""
        return self.asked("wanted", counts, lambda: np.stack((counts, np.cumsum(counts) - counts), axis=1))

    def _cut(self, counts: Int64Array, width: int) -> Int64Array:
        each = -(-counts // width)
        segment = np.repeat(np.arange(len(counts)), each)
        first = (np.arange(len(segment)) - (np.cumsum(each) - each)[segment]) * width
        squares = np.array([math.isqrt(numel - 1) + 1 for numel in self._block.segment_numels.tolist()], np.int64)
        number, before = np.minimum(counts[segment] - first, width), (np.cumsum(counts) - counts)[segment]
        return np.stack((segment, first, number, before, squares[segment]), axis=1)

    def asked(self, what: str, counts: Int64Array, make: Callable[[], Int64Array]) -> Tensor:
        numbers, table = self._kept.get(what, (b"", None))
        if table is None or numbers != counts.tobytes():
            table = self._moved(make())
            self._kept[what] = (counts.tobytes(), table)
        return table

    @cached_property
    def bases(self) -> Tensor:
        """``int64[T]``: how many elements there are in the tiles before."""
        counts = self.table[:, 1]
        return counts.cumsum(0) - counts

    @cached_property
    def places(self) -> Tensor:
        """``int64[R, 3]``."""
        return self._moved(self._block.runs[:, [2, 1, 0]])

    def _moved(self, values: np.ndarray[Any, Any]) -> Tensor:
        return placed(np.ascontiguousarray(values, dtype=np.int64), self._device)


def _bounds(blocks: tuple[Block, ...]) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The first run of each block, of each segment, and the first tile of each run; and where the last ones end."""
    before = np.cumsum([0, *(len(block.runs) for block in blocks)])
    moved = (block.segments[1:] + first for block, first in zip(blocks, before[:-1], strict=True))
    counts = [-(-block.runs[:, 1] // CHUNK) for block in blocks]
    return before, np.concatenate(([0], *moved)), np.concatenate(([0], np.cumsum(np.concatenate(counts))))


_tiles: WeakKeyDictionary[Block, dict[tuple[object, ...], Tiles]] = WeakKeyDictionary()


def tiles_of(block: Block, device: torch.device, *others: Block) -> Tiles:
    """The tables of a block, or of several together, made once for each device."""
    kept = _tiles.setdefault(block, {})
    key = device, *map(id, others)  # of which the tables hold all, so that no other block can have its id
    if key not in kept:
        kept[key] = Tiles((block, *others), device)
    return kept[key]


_compiled: dict[tuple[object, ...], Any] = {}
"""Kernels by what Triton compiles them for."""


def launch(kernel: Any, programs: int, *arguments: object, warps: int = 4, **constants: object) -> None:
    """Starts so many programs of a kernel on the device of its first argument, a tensor.

    Products and sums are never fused, nothing is tuned: the bits are the same wherever it runs. What Triton has to find
    out of arguments at each launch takes the host several times as long as the launch; so what it compiled for such
    arguments is kept, and started by itself.
    """
    if not programs:
        return
    first: Any = arguments[0]
    key = kernel, warps, first.get_device(), tuple(map(_kind_of, arguments)), tuple(constants.items())
    with torch.cuda.device_of(first):
        if (compiled := _compiled.get(key)) is None:
            _compiled[key] = kernel[(programs,)](*arguments, num_warps=warps, enable_fp_fusion=False, **constants)
        else:
            others = kernel.arg_names[len(arguments) :]
            compiled[(programs, 1, 1)](*arguments, *(constants[name] for name in others))


def _kind_of(argument: Any) -> object:
    """All that Triton may compile a kernel anew for, or more."""
    if isinstance(argument, Tensor):
        wide = torch.version.hip and argument.untyped_storage().nbytes() >> 31
        return argument.dtype, argument.data_ptr() % 16 == 0, wide
    if type(argument) is int:
        return argument == 1, argument % 16 == 0, (argument ^ argument >> 64).bit_length() // 32
    return type(argument)


def warps(width: int) -> int:
    """Warps for programs of so many elements: one for the fewest, as more would wait for one another."""
    return max(width // 512, 1)


def halves(key: int) -> tuple[int, int]:
    """The low and the high half of a key, as signed numbers of 32 bits."""
    low, high = key & 0xFFFFFFFF, key >> 32
    return low - ((low >> 31) << 32), high - ((high >> 31) << 32)


def jitted(*changing: str) -> Any:
    """Compiles a kernel on first use, once whatever the values of ``changing`` are, addresses among them."""
    return triton.jit(do_not_specialize=changing, do_not_specialize_on_alignment=changing)
