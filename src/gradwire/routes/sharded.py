"""Every worker owns a share of the elements, averages it, and compresses the average again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codec import Codec
from gradwire.layout import Block
from gradwire.memory import Feedback
from gradwire.wire.requests import AllGather, AllToAll, Synchronization


@dataclass(frozen=True, eq=False)
class Shards:
    """A block cut among the workers.

    Attributes:
        all: The shard of each rank, over the gradient's buffer.
        own: This rank's shard, over a buffer of its own.
    """

    all: tuple[Block, ...]
    own: Block

    @classmethod
    def of(cls, block: Block, rank: int, world_size: int) -> Shards:
        """Cuts ``block`` for ``world_size`` owners."""
        shards = block.shards(world_size)
        return cls(shards, shards[rank].packed())


def sharded(
    worker: Codec,
    owner: Codec,
    shards: Shards,
    gradient: Tensor,
    feedback: Feedback,
    owner_feedback: Feedback,
    key: int,
    owner_key: int,
) -> Synchronization:
    """Compresses on the way to the owner and on the way back: 2 b (n - 1) / n bytes for payloads of b bytes.

    This is bidirectional compression without a server: Seide et al. 2014 for 1-bit SGD; ``x - eta Q_M(mean Q_W(g))``
    of Dutta et al. 2020, arXiv:1911.08250.

    Args:
        worker: Q_W, what writes a worker's gradient.
        owner: Q_M, what writes an owner's average.
        shards: Who owns what.
        gradient: ``float32`` flat buffer; left with the average.
        feedback: This worker's memory of the gradient.
        owner_feedback: This owner's memory of its shard's average.
        key: Randomness of this rank in this step.
        owner_key: Randomness of this rank as an owner.
    """
    count, device = len(shards.all), gradient.device
    sizes = [worker.payload_bytes(shard) for shard in shards.all]
    outgoing = torch.empty((count, max(sizes)), dtype=torch.uint8, device=device)
    for shard, size, row in zip(shards.all, sizes, outgoing, strict=True):
        worker.encode(shard, gradient, feedback, row[:size], key)
        row[size:] = 0
    incoming = yield AllToAll(outgoing)

    average = torch.empty(shards.own.positions, dtype=torch.float32, device=device)
    worker.decode(shards.own, incoming[:, : worker.payload_bytes(shards.own)], average, 1 / count)

    sizes = [owner.payload_bytes(shard) for shard in shards.all]
    payload = torch.empty(max(sizes), dtype=torch.uint8, device=device)
    own_size = owner.payload_bytes(shards.own)
    owner.encode(shards.own, average, owner_feedback, payload[:own_size], owner_key)
    payload[own_size:] = 0
    payloads = yield AllGather(payload)
    for shard, size, row in zip(shards.all, sizes, payloads, strict=True):
        owner.decode(shard, row[None, :size], gradient, 1.0)
