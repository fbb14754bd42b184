"""Workers of a node average densely among themselves, each a share; only shares travel between nodes, compressed.

A node's workers cut every tensor along its first dimension, as FSDP2 does, and each averages its rows over the node.
What it has then is the gradient of a smaller model, and the workers that have the same rows in the other nodes average
it as any workers would, by any method. So what leaves a node is what one worker would send of the whole gradient, over
all network cards of the node; and a worker remembers a share of what it would.

Reduce, average between nodes, gather: as in Rajbhandari et al. 2020, arXiv:1910.02054, and the hierarchical collectives
of ZeRO++, Wang et al. 2023, arXiv:2306.10209.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.deferred import placed
from gradwire.layout import Block, Int64Array, Slot, aligned
from gradwire.memory import NONE
from gradwire.wire.requests import AllGather, AllToAll, Synchronization, among


@dataclass(frozen=True, eq=False)
class Shares:
    """Parameters of a flat buffer, cut among the workers of a node.

    Attributes:
        slots: The parameters.
        rows: First and one past the last row of each share of a parameter, by place.
        place: This worker's.
        dtype: Of what travels within the node.
        codec: What writes it instead, if anything does, whatever each worker's rows: segments end where it cuts.
    """

    slots: tuple[Slot, ...]
    rows: tuple[tuple[tuple[int, int], ...], ...]
    place: int
    dtype: torch.dtype
    codec: Codec | None = None

    @classmethod
    def cut(
        cls,
        slots: Sequence[Slot],
        rows: Callable[[int, int], tuple[int, int]],
        place: int,
        places: int,
        dtype: torch.dtype,
        codec: Codec | None = None,
    ) -> Shares:
        """Cuts parameters along their first dimensions.

        Args:
            slots: Where they lie in a gradient's buffer.
            rows: First and one past the last of so many rows that a place has.
            place: This worker's.
            places: How many there are.
            dtype: Of what travels within the node.
            codec: What writes it instead.
        """
        cuts = tuple(tuple(rows(slot.shape[0], each) for each in range(places)) for slot in slots)
        return cls(tuple(slots), cuts, place, dtype, codec)

    @cached_property
    def own(self) -> tuple[Slot, ...]:
        """This worker's rows of every parameter, in a buffer of their own."""
        placed, offset = [], 0
        for slot, cuts in zip(self.slots, self.rows, strict=True):
            first, stop = cuts[self.place]
            placed.append(Slot(slot.name, (stop - first, *slot.shape[1:]), offset))
            offset = aligned(placed[-1].stop)
        return tuple(placed)

    @cached_property
    def width(self) -> int:
        """Elements of the widest share's buffer."""
        return max(sum(aligned(stop - start) for start, stop in spans) for spans in self._spans)

    @cached_property
    def _spans(self) -> list[list[tuple[int, int]]]:
        """Where in the gradient each place's rows lie."""
        row = [slot.numel // slot.shape[0] for slot in self.slots]
        return [
            [
                (slot.offset + cuts[place][0] * size, slot.offset + cuts[place][1] * size)
                for slot, cuts, size in zip(self.slots, self.rows, row, strict=True)
            ]
            for place in range(len(self.rows[0]))
        ]

    def outgoing(self, gradient: Tensor) -> Tensor:
        """Everybody's rows of a gradient: ``dtype[places, width]``."""
        zeros, parts = gradient.new_zeros(self.width), []
        for spans in self._spans:
            left = self.width
            for start, stop in spans:
                gap = aligned(stop - start) - (stop - start)
                parts += [gradient[start:stop], zeros[:gap]] if gap else [gradient[start:stop]]
                left -= stop - start + gap
            parts.append(zeros[:left])
        return torch.cat(parts).to(self.dtype).view(len(self._spans), self.width)

    def write(self, values: Tensor, key: int) -> Tensor:
        """The bytes of rows, ``dtype[k, width]``, for as many workers."""
        if self.codec is None:
            return values.view(torch.uint8)
        payloads = values.new_empty((len(values), self.codec.payload_bytes(self._written)), dtype=torch.uint8)
        for row, payload in zip(values, payloads, strict=True):
            self.codec.encode(self._written, row, NONE, payload, key)
        return payloads

    def mean(self, payloads: Tensor) -> Tensor:
        """Of some workers' bytes for the same rows: ``float32[width]``."""
        if self.codec is None:
            return payloads.view(self.dtype).mean(0, dtype=torch.float32)
        mean = torch.empty(self.width, dtype=torch.float32, device=payloads.device)
        self.codec.decode(self._written, payloads, mean, 1 / len(payloads))
        return mean

    def read(self, payloads: Tensor) -> Tensor:
        """The rows that some bytes stand for: ``[k, width]``."""
        if self.codec is None:
            return payloads.view(self.dtype)
        return torch.stack([self.mean(each[None]) for each in payloads])

    @cached_property
    def gaps(self) -> Int64Array:
        """Where nothing lies in this worker's own buffer, ``int64[k]``; a codec may have left something there."""
        empty = np.ones(self.width, dtype=bool)
        for slot in self.own:
            empty[slot.offset : slot.stop] = False
        return np.flatnonzero(empty)

    @cached_property
    def _written(self) -> Block:
        """A share's buffer as a codec sees it."""
        return Block.dense("rows of a node", np.array([self.width]))

    def take(self, averages: Tensor, gradient: Tensor) -> None:
        """Writes the averages of all rows, ``dtype[places, width]``, to a gradient."""
        targets, sources = [], []
        for spans, row in zip(self._spans, averages, strict=True):
            offset = 0
            for start, stop in spans:
                targets.append(gradient[start:stop])
                sources.append(row[offset : offset + stop - start])
                offset += aligned(stop - start)
        torch._foreach_copy_(targets, sources)


def two_level(
    shares: Shares, gradient: Tensor, numel: int, keys: tuple[int, int], between: Callable[[Tensor], Synchronization]
) -> Synchronization:
    """Averages within the node, between nodes, and hands round: two rounds more than ``between`` has.

    Within a node 2 d (L - 1) / L values a worker, L of them; between nodes a share of what ``between`` sends of d.

    Args:
        shares: Who has which rows.
        gradient: ``float32`` flat buffer; left with the average in the shares' rows.
        numel: Elements of this worker's own buffer.
        keys: Randomness of this worker, and what those of its place in all nodes share.
        between: Averages that buffer, in place, over the workers of this place in all nodes.
    """
    incoming = yield AllToAll(shares.write(shares.outgoing(gradient), keys[0]), among="node")
    own = shares.mean(incoming)
    if shares.codec is not None:
        own[placed(shares.gaps, own.device)] = 0  # or what is written of them differs from node to node
    yield from among("peers", between(own[:numel]))
    averages = yield AllGather(shares.write(own.to(shares.dtype)[None], keys[1])[0], among="node")
    shares.take(shares.read(averages), gradient)
