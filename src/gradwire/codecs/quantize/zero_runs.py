"""Three values, the nearest one, and as few bytes for them as the zeros among them allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.capacity import Capacity
from gradwire.codecs.codec import Codec
from gradwire.codecs.quantize.quantiser import Quantiser
from gradwire.deferred import Count, expect, known, learn
from gradwire.errors import PayloadError
from gradwire.kernels.code import trits_stride
from gradwire.kernels.codes import ThreeLC
from gradwire.kernels.reference.zero_runs import ZEROS
from gradwire.layout import Block, Slot
from gradwire.memory import Feedback, Store

_COUNT_BYTES = 4


@dataclass(frozen=True)
class ZeroRuns(Codec):
    """What :class:`~gradwire.kernels.codes.ThreeLC` writes, with its runs of zeros shortened as in 3LC.

    How short that is depends on the values, so a payload has room for a quarter more than the neediest rank wanted in
    the step before. What does not fit is read as zeros and stays in the memory: a value that is sent lies between half
    the scale and the scale, so taking it back is exact. In the first step there is room for everything.

    A payload is the scales, how many bytes the coded trits wanted (int32, little-endian), and of those as many as there
    is room for, followed by zeros.

    Attributes:
        sparsity: As in :class:`~gradwire.kernels.codes.ThreeLC`.
        room: For the coded trits: a share of the bytes that they take uncoded.
    """

    sparsity: float = 1.0
    room: Capacity = field(default_factory=Capacity)

    def __post_init__(self) -> None:
        self._whole()

    def _whole(self) -> Quantiser:
        return Quantiser(ThreeLC(self.sparsity))

    def installed(self, store: Store, slots: Sequence[Slot], numel: int) -> ZeroRuns:
        """With the store for the room."""
        return replace(self, room=replace(self.room, store=store))

    def owned(self) -> ZeroRuns:
        """With a room of its own."""
        return replace(self, room=replace(self.room, kept_as=f"owner_{self.room.kept_as}"))

    def payload_bytes(self, block: Block) -> int:
        """Scales, a count, and the room."""
        return 4 * block.segment_count + _COUNT_BYTES + self.room.bytes(block, 0, trits_stride(block.positions))

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Rounds, shortens, and takes back what does not fit."""
        head = 4 * block.segment_count
        edge = head + _COUNT_BYTES
        room = payload.numel() - edge
        whole = torch.empty(self._whole().payload_bytes(block), dtype=torch.uint8, device=payload.device)
        self._whole().encode(block, gradient, feedback, whole, key)
        coded = torch.empty_like(whole[head:])
        wanted = kernels.zero_runs_encode(whole[head:], coded, room)
        payload[:head] = whole[:head]
        payload[head:edge].view(torch.int32).copy_(wanted)
        payload[edge:] = coded[:room]
        if feedback.residual is not None and not known(wanted <= room):
            _take_back(block, whole, coded[:room], wanted, gradient, feedback.residual)

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Makes runs as long as they were, and sums scaled digits."""
        self.check(block, payloads)
        if not block.numel:
            return
        head = 4 * block.segment_count
        edge = head + _COUNT_BYTES
        room = payloads.shape[1] - edge
        stride = trits_stride(block.positions)
        whole = torch.empty((len(payloads), self._whole().payload_bytes(block)), dtype=torch.uint8, device=out.device)
        whole[:, :head] = payloads[:, :head]
        for row, payload, wanted in zip(whole, payloads, self._wanted(block, payloads), strict=True):
            expect((wanted >= 0) & (wanted <= stride), partial(_impossible, wanted, stride))
            read = kernels.zero_runs_decode(payload[edge:], wanted.clamp(0, room), row[head:])
            expect((wanted > room) | (read >= stride), partial(_too_few, read, stride))
        self._whole().decode(block, whole, out, weight)

    @property
    def news_bytes(self) -> int:
        """A float32."""
        return 4

    def news(self, block: Block, payloads: Tensor) -> Tensor:
        """A float32: the largest share of its uncoded bytes that any payload wanted, or NaN if one is not finite."""
        most = torch.zeros(1, device=payloads.device, dtype=torch.float32)
        if block.numel:
            most += self._wanted(block, payloads).max() / trits_stride(block.positions)
            scales = payloads[:, : 4 * block.segment_count].contiguous().view(torch.float32)
            most.masked_fill_(~scales.isfinite().all(), torch.nan)
        return most.view(torch.uint8)

    def heard(self, block: Block, news: Tensor) -> None:
        """Keeps the share of the neediest with some to spare; the former one after values that are not finite."""
        learn(news.contiguous().view(torch.float32).max(), lambda most: self.room.heard(block, float(most)))

    def _wanted(self, block: Block, payloads: Tensor) -> Tensor:
        """How many bytes the coded trits of each payload take: ``int32[n]``."""
        head = 4 * block.segment_count
        return payloads[:, head : head + _COUNT_BYTES].contiguous().view(torch.int32)[:, 0]


def _take_back(block: Block, whole: Tensor, coded: Tensor, wanted: Count, gradient: Tensor, residual: Tensor) -> None:
    """Adds to the residual what the trits stand for of which ``coded`` says nothing any more."""
    head = 4 * block.segment_count
    trits = whole[head:]
    read = kernels.zero_runs_decode(coded, wanted.clamp(max=len(coded)), torch.empty_like(trits))
    trits.masked_fill_(torch.arange(len(trits), device=trits.device) < read, ZEROS)
    whole[:head].view(torch.float32).nan_to_num_(nan=0.0)  # nothing of a segment that is not finite was sent
    unsent = torch.empty_like(gradient)
    kernels.decode(ThreeLC(), block, whole[None], unsent, 1.0)
    kernels.accumulate(block, unsent, residual, 1.0, 1.0, when=wanted > len(coded))


def _impossible(wanted: Count, stride: int) -> PayloadError:
    return PayloadError(f"a payload says that its trits take {int(wanted)} bytes; uncoded they take {stride}")


def _too_few(read: Count, stride: int) -> PayloadError:
    return PayloadError(f"the bytes decode to {int(read)} bytes of trits, fewer than {stride}")
