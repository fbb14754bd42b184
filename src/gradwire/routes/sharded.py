"""Every worker owns a share of the elements, averages it, and compresses the average again.

A segment ends at a shard's edge, because its owner sees nothing else: with ``granularity="model"`` and n workers there
are n segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codecs.untouched import as_admitted
from gradwire.layout import Block
from gradwire.routes.operator import Operator
from gradwire.wire.requests import AllGather, AllToAll, Synchronization


@dataclass(frozen=True, eq=False)
class Shards:
    """A block cut among the workers.

    Attributes:
        all: The shard of each rank, over the gradient's buffer.
        different: One of each kind, whose payloads have the same size.
        own: This rank's shard, over a buffer of its own.
    """

    all: Sequence[Block]
    different: Sequence[Block]
    own: Block

    @classmethod
    def of(cls, block: Block, rank: int, world_size: int) -> Shards:
        """Cuts ``block`` for ``world_size`` owners."""
        shards = block.shards(world_size)
        return cls(shards, shards.different, shards[rank].packed())


def sharded(worker: Operator, owner: Operator, block: Block, shards: Shards, gradient: Tensor) -> Synchronization:
    """Compresses on the way to the owner and on the way back: 2 b (n - 1) / n bytes for payloads of b bytes.

    This is bidirectional compression without a server: Seide et al. 2014 for 1-bit SGD; ``x - eta Q_M(mean Q_W(g))``
    of Dutta et al. 2020, arXiv:1911.08250.

    Args:
        worker: Q_W, what writes a worker's gradient.
        owner: Q_M, what writes an owner's average of its shard.
        block: Which elements of ``gradient``.
        shards: Who owns what of them.
        gradient: ``float32`` flat buffer; left with the average.
    """
    admitted = worker.feedback.before_encode(block, gradient)
    outgoing = _for_owners(worker, shards, admitted)
    worker.feedback.after_encode(block, admitted)
    incoming = yield AllToAll(outgoing)

    average = torch.empty(shards.own.positions, dtype=torch.float32, device=gradient.device)
    received = incoming[:, : worker.codec.payload_bytes(shards.own)]
    worker.codec.decode(shards.own, received, average, 1 / len(shards.all))
    news = worker.codec.news(shards.own, received)

    edge = max(map(owner.codec.payload_bytes, shards.different))
    payload = torch.empty(edge + len(news), dtype=torch.uint8, device=gradient.device)
    own_size = owner.codec.payload_bytes(shards.own)
    readmitted = owner.feedback.before_encode(shards.own, average)
    with as_admitted(readmitted, owner.feedback, owner.codec):
        owner.codec.encode(shards.own, readmitted, owner.feedback, payload[:own_size], owner.key)
    owner.feedback.after_encode(shards.own, readmitted)
    payload[own_size:edge] = 0
    payload[edge:] = news
    payloads = yield AllGather(payload, straight=True)
    owner.codec.decode_each(shards.all, payloads[:, :edge], gradient)
    worker.codec.heard(block, payloads[:, edge:])
    owner.codec.heard(block, owner.codec.news_each(shards.all, payloads[:, :edge]))
    worker.feedback.after_decode(block, gradient)


def scattered(worker: Operator, shards: Shards, gradient: Tensor, average: Tensor) -> Synchronization:
    """The way to the owners alone, each of whom keeps the average of its share: b (n - 1) / n bytes.

    So a sharded model's gradients are reduced (ZeRO++, Wang et al. 2023, arXiv:2306.10209).

    Args:
        worker: Q_W, what writes a worker's gradient; without a memory.
        shards: Who owns what of ``gradient``, and where its own share lies in ``average``.
        gradient: ``float32`` flat buffer; not changed.
        average: ``float32`` flat buffer, in which this rank's share is written.
    """
    incoming = yield AllToAll(_for_owners(worker, shards, gradient))
    received = incoming[:, : worker.codec.payload_bytes(shards.own)]
    worker.codec.decode(shards.own, received, average, 1 / len(shards.all))


def scattered_densely(shards: Shards, gradient: Tensor, average: Tensor) -> Synchronization:
    """The same without compression."""
    rows = torch.stack([torch.cat(shard.parts(gradient)) for shard in shards.all])
    incoming = (yield AllToAll(rows.view(torch.uint8))).clone(memory_format=torch.contiguous_format)
    mean = incoming.view(torch.float32).mean(0)
    for part, values in zip(
        shards.own.parts(average), mean.split([stop - start for start, stop in shards.own.spans]), strict=True
    ):
        part.copy_(values)


def _for_owners(worker: Operator, shards: Shards, admitted: Tensor) -> Tensor:
    """A payload for every owner, in rows of one length."""
    edge = max(map(worker.codec.payload_bytes, shards.different))
    outgoing = torch.empty((len(shards.all), edge), dtype=torch.uint8, device=admitted.device)
    with as_admitted(admitted, worker.feedback, worker.codec):
        worker.codec.encode_each(shards.all, admitted, worker.feedback, outgoing, worker.key)
    return outgoing
