"""A sparse codec is three choices: which coordinates, how their values are written, how their indices are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codec import Codec
from gradwire.index import EliasFano, IndexCoding
from gradwire.layout import Block, Granularity, Int64Array, flat_slots
from gradwire.memory import Feedback
from gradwire.quantize.values import FloatValues, ValueCoding
from gradwire.select import Selector


@dataclass(frozen=True)
class Sparse(Codec):
    """Selected coordinates of each segment; a payload is all values, then all indices.

    Attributes:
        select: Which coordinates.
        values: How their values are written.
        indices: How their positions are written.
    """

    selects: ClassVar[bool] = True

    select: Selector
    values: ValueCoding = field(default_factory=FloatValues)
    indices: IndexCoding = field(default_factory=EliasFano)

    def at(self, step: int) -> Sparse:
        """With the selector's choice of this step."""
        return replace(self, select=self.select.at(step))

    def payload_bytes(self, block: Block) -> int:
        """What values and indices need."""
        _, chosen = _chosen(self.select, block)
        return self.values.size(chosen) + self.indices.size(chosen.numel, block.positions)

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Selects, writes, and takes what was really written from the residual."""
        counts, chosen = _chosen(self.select, block)
        positions = torch.empty(chosen.numel, dtype=torch.int64, device=gradient.device)
        values = torch.empty(chosen.numel, dtype=torch.float32, device=gradient.device)
        self.select.select(block, gradient, feedback, counts, positions, values)
        edge = self.values.size(chosen)
        self.values.encode(chosen, values, payload[:edge], key)
        self.indices.encode(positions, block.positions, payload[edge:])
        feedback.masked(block, positions[values.isfinite()])
        if feedback.residual is not None:
            self.values.decode(chosen, payload[:edge], values)
            kernels.for_device(gradient.device).subtract(block, feedback.residual, positions, values)

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Reads all payloads, checks their positions, then writes ``out`` once."""
        positions, values = self.read(block, payloads)
        kernels.for_device(out.device).scatter_sum(block, positions, values, out, weight)

    def read(self, block: Block, payloads: Tensor) -> tuple[Tensor, Tensor]:
        """Positions and values of all payloads, one row each."""
        self.check(block, payloads)
        _, chosen = _chosen(self.select, block)
        edge = self.values.size(chosen)
        positions = torch.empty((len(payloads), chosen.numel), dtype=torch.int64, device=payloads.device)
        values = torch.empty((len(payloads), chosen.numel), dtype=torch.float32, device=payloads.device)
        for row, payload in enumerate(payloads):
            self.values.decode(chosen, payload[:edge], values[row])
            self.indices.decode(payload[edge:], block.positions, positions[row])
        return positions, values


@lru_cache(maxsize=4096)
def _chosen(select: Selector, block: Block) -> tuple[Int64Array, Block]:
    """How many coordinates of each segment are sent, and the block that their values form."""
    counts = select.counts(block)
    streams = [f"values of segment {segment} with {block.slots[0].name}" for segment in range(len(counts))]
    slots = flat_slots([(stream, (int(count),)) for stream, count in zip(streams, counts, strict=True)])
    return counts, Block.cut(slots, Granularity("layer"))
