"""Levels of a dead-zone quantiser, entropy-coded, in as many bits as asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from gradwire import deferred, kernels
from gradwire.codecs.budget import Budget
from gradwire.codecs.codec import Codec
from gradwire.deferred import flag, learn
from gradwire.errors import ConfigurationError
from gradwire.kernels.parts import side_by_side
from gradwire.kernels.reference import deadzone_payload_bytes, deadzone_room, deadzone_tile
from gradwire.layout import Block, Slot
from gradwire.memory import Feedback, Remainder, Store

EXACT = (128, 128, 128)
"""Points of levels that stand for as many steps."""

COARSER = 1 + 1 / 16

FINER = 65536.0
"""The most by which a gradient's mean magnitude counts as smaller than that of its segment with what waits there."""

FEWEST, MOST = 0.005, 8.0
"""Bits a value."""


class Sampled(NamedTuple):
    """What the step of a block is chosen by, as :func:`gradwire.kernels.deadzone_step` takes it.

    Attributes:
        block: Which elements.
        sample: Of them.
        tile: Elements of a tile.
        room: Bits.
        key: Randomness, where values are to be rounded by chance.
        turn: What the sample was taken by.
        near: A step from which on it is looked for, if one is known.
        exactly: Whether it is to be the finest.
    """

    block: Block
    sample: Tensor
    tile: int
    room: int
    key: int | None = None
    turn: int = 0
    near: float | None = None
    exactly: bool = True


def steps_of(sampled: Sequence[Sampled]) -> list[tuple[float, tuple[int, int, int]]]:
    """The step and the points of each block, found side by side; the host waits once for all samples."""
    arrived = [deferred.sent_to_host(each.sample) for each in sampled]
    here = [each._replace(sample=sample()) for each, sample in zip(sampled, arrived, strict=True)]
    return side_by_side(lambda each: kernels.deadzone_step(*each), here)


@dataclass(frozen=True)
class DeadZone(Codec):
    """Magnitudes in steps, rounded down to zero below eleven sixteenths, and codes for what is left.

    A step is relative to the mean magnitude of its segment's gradient and the same for all segments: the finest under
    which the codes fill ``bits`` for each value, found by all of up to 131,072 values, and of more by a sample of some
    30,000 or more. So a payload's size depends on nothing but its block. What finds no room, if the sample was too
    hopeful, is the last values, and stays in the memory. Of buffers that share bits the size depends on their budget.

    Attributes:
        by_chance: Whether values are rounded by chance.
        bits: For each value.
        budget: The bits that it shares with other buffers, where it does.
        budget_kept_as: What that is kept as.
    """

    by_chance: ClassVar[bool] = False
    bits: float = 0.1
    budget: Budget | None = field(default=None, repr=False, compare=False, kw_only=True)
    budget_kept_as: str = field(default="budget", repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if not FEWEST <= self.bits <= MOST:
            raise ConfigurationError(
                f"bits={self.bits!r} is out of range; choose {FEWEST} to {MOST:g} a value, usually 0.1"
            )

    def sharing(self, store: Store, slots: Sequence[Slot], workers: int) -> Self:
        """The codec of one of several buffers of so many workers that are to be written with the same step."""
        return replace(self, budget=Budget.of(self.budget_kept_as, store, slots, self.bits, workers))

    def owned(self) -> Self:
        """With a budget of its own."""
        return replace(self, budget_kept_as=f"owner_{self.budget_kept_as}")

    def at(self, step: int) -> Self:
        """With its share of the bits."""
        if self.budget is None:
            return self
        return replace(self, bits=min(max(self.bits * self.budget.share(step), FEWEST), MOST))

    @property
    def tile(self) -> int:
        """Elements whose codes are read independently of all others."""
        return deadzone_tile(self.bits)

    def payload_bytes(self, block: Block) -> int:
        """Steps, a head, sizes of tiles, and the codes' room."""
        return deadzone_payload_bytes(block, self.tile, self.bits)

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Chooses the step, and writes what has room."""
        self.encode_each([block], gradient, feedback, payload[None], key)

    def encode_each(
        self, blocks: Sequence[Block], gradient: Tensor, feedback: Feedback, payloads: Tensor, key: int
    ) -> None:
        """The same block by block, once the steps of all are chosen."""
        values = feedback.buffer(gradient)
        written = [payload[: self.payload_bytes(block)] for block, payload in zip(blocks, payloads, strict=True)]
        scales = [_scales(block, gradient, feedback) for block in blocks]
        sampled = []
        for block, scale, payload in zip(blocks, scales, written, strict=True):
            room = 8 * deadzone_room(block, self.tile, payload)
            sample = kernels.deadzone_sample(block, values, scale, room, key)
            sampled.append(Sampled(block, sample, self.tile, room, key if self.by_chance else None, key))
        for number, (step, points) in enumerate(steps_of(sampled)):
            payload = written[number]
            self._put(blocks[number], values, feedback, scales[number], step, points, payload, key)
            payloads[number, payload.numel() :] = 0

    def _put(
        self,
        block: Block,
        values: Tensor,
        feedback: Feedback,
        scales: Tensor,
        step: float,
        points: tuple[int, int, int],
        payload: Tensor,
        key: int,
    ) -> None:
        """Writes what has room by a step relative to the scales."""
        kernels.deadzone_encode(block, values, feedback.residual is not None, scales * step, points, self.tile, payload)

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums what levels stand for."""
        self.check(block, payloads)
        kernels.deadzone_decode(block, payloads, self.tile, out, weight)

    @property
    def news_bytes(self) -> int:
        """A float32 where bits are shared."""
        return 0 if self.budget is None else 4

    def news(self, block: Block, payloads: Tensor) -> Tensor:
        """Where bits are shared, a float32: the largest step of all payloads, or NaN if a value is not finite."""
        if self.budget is None:
            return super().news(block, payloads)
        steps = payloads[:, : 4 * self._steps(block)].contiguous().view(torch.float32)
        largest = steps[:, -1].max() if steps.numel() else steps.new_zeros(())
        return largest.view(1).view(torch.uint8)

    def heard(self, block: Block, news: Tensor) -> None:
        """Has the next step's bits depend on how large the step was."""
        if self.budget is not None:
            budget = self.budget
            learn(news.contiguous().view(torch.float32).max(), lambda step: budget.heard(float(step)))

    def _steps(self, block: Block) -> int:
        """Of a payload."""
        return block.segment_count


def _scales(block: Block, gradient: Tensor, feedback: Feedback) -> Tensor:
    """What the step is relative to in each segment, as :func:`gradwire.kernels.deadzone_scales` gives it.

    Of several segments it is the mean magnitude of the gradient, as far as :data:`FINER` allows: relative to what waits
    itself, a value that is alone, or values that are alike, would look the same however long they have waited.
    """
    scales = kernels.deadzone_scales(block, feedback.source(gradient))
    if feedback.residual is None or block.segment_count == 1:
        return scales
    latest = kernels.deadzone_scales(block, kernels.Compensated(gradient))
    return torch.where(latest > 0, latest.clamp(max=scales).clamp(min=scales / FINER), scales)


@dataclass(frozen=True)
class Dithered(DeadZone):
    """Multiples of the step that values are rounded to by chance, so that they are right on average.

    Codes and payloads are the same; levels stand for what they say. Where codes have no room the step is made a
    sixteenth larger, and all is rounded again.
    """

    by_chance: ClassVar[bool] = True

    def remainder(self, most: int) -> Remainder:
        """A step may be longer than most values, which are then off by more than they are."""
        return "grows"

    def _put(
        self,
        block: Block,
        values: Tensor,
        feedback: Feedback,
        scales: Tensor,
        step: float,
        points: tuple[int, int, int],
        payload: Tensor,
        key: int,
    ) -> None:
        """Rounds, and writes all."""
        fits, rounded = flag(False), torch.empty_like(values)
        while not fits:
            kernels.deadzone_dither(block, values, scales * step, key, rounded)
            fits = kernels.deadzone_encode(block, rounded, False, scales * step, EXACT, self.tile, payload)
            step *= COARSER
        if feedback.residual is not None:
            for kept, sent in zip(block.parts(feedback.residual), block.parts(rounded), strict=True):
                kept -= sent
