"""Levels of a dead-zone quantiser, entropy-coded, in as many bits as asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.codec import Codec
from gradwire.deferred import flag
from gradwire.errors import ConfigurationError
from gradwire.kernels.reference import deadzone_payload_bytes, deadzone_room, deadzone_tile
from gradwire.layout import Block
from gradwire.memory import Feedback, Remainder

EXACT = (128, 128, 128)
"""Points of levels that stand for as many steps."""

COARSER = 1 + 1 / 16


@dataclass(frozen=True)
class DeadZone(Codec):
    """Magnitudes in steps, rounded down to zero below eleven sixteenths, and codes for what is left.

    A step is relative to its segment's mean magnitude and the same for all segments: the finest under which the codes
    fill ``bits`` for each value, found by a sample of up to some 260,000 values. So a payload's size depends on nothing
    but its block. What finds no room, if the sample was too hopeful, is the last values, and stays in the memory.

    Attributes:
        bits: For each value.
    """

    bits: float = 0.1

    def __post_init__(self) -> None:
        if not 0.005 <= self.bits <= 8:
            raise ConfigurationError(f"bits={self.bits!r} is out of range; choose 0.005 to 8 a value, usually 0.1")

    @property
    def tile(self) -> int:
        """Elements whose codes are read independently of all others."""
        return deadzone_tile(self.bits)

    def payload_bytes(self, block: Block) -> int:
        """Steps, a head, sizes of tiles, and the codes' room."""
        return deadzone_payload_bytes(block, self.tile, self.bits)

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Chooses the step, and writes what has room."""
        scales = kernels.deadzone_scales(block, feedback.source(gradient))
        values = feedback.buffer(gradient)
        room = 8 * deadzone_room(block, self.tile, payload)
        sample = kernels.deadzone_sample(block, values, scales, room)
        step, points = kernels.deadzone_step(block, sample, self.tile, room)
        kernels.deadzone_encode(block, values, feedback.residual is not None, scales * step, points, self.tile, payload)

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums what levels stand for."""
        self.check(block, payloads)
        kernels.deadzone_decode(block, payloads, self.tile, out, weight)


@dataclass(frozen=True)
class Dithered(DeadZone):
    """Multiples of the step that values are rounded to by chance, so that they are right on average.

    Codes and payloads are the same; levels stand for what they say. Where codes have no room the step is made a
    sixteenth larger, and all is rounded again.
    """

    def remainder(self, most: int) -> Remainder:
        """A step may be longer than most values, which are then off by more than they are."""
        return "grows"

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Chooses the step, rounds, and writes all."""
        scales = kernels.deadzone_scales(block, feedback.source(gradient))
        values = feedback.buffer(gradient)
        room, rounded = 8 * deadzone_room(block, self.tile, payload), torch.empty_like(values)
        sample = kernels.deadzone_sample(block, values, scales, room)
        step, _ = kernels.deadzone_step(block, sample, self.tile, room, key)
        fits = flag(False)
        while not fits:
            kernels.deadzone_dither(block, values, scales * step, key, rounded)
            fits = kernels.deadzone_encode(block, rounded, False, scales * step, EXACT, self.tile, payload)
            step *= COARSER
        if feedback.residual is not None:
            for kept, sent in zip(block.parts(feedback.residual), block.parts(rounded), strict=True):
                kept -= sent
