"""Four bytes, two, one or none a value, by its exponent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs import capacity
from gradwire.codecs.codec import Codec
from gradwire.deferred import learn
from gradwire.errors import ConfigurationError
from gradwire.kernels.reference import inceptionn_payload_bytes
from gradwire.layout import Block, Slot
from gradwire.memory import Feedback, Kind, Store

FIELD = "inceptionn.room"
"""What the room of the next step is kept as: bits a value, by parameter name."""

LEAST = 1 / 16
"""Share of the room that there always is, so that a gradient that wakes up finds some."""


@dataclass(frozen=True)
class Inceptionn(Codec):
    """Mantissas with an explicit leading one, shifted by their exponents and cut off below an absolute error bound.

    A value below the bound is not sent; others take one byte, two, or all four of a float, and a tag of two bits says
    which. How many bytes that makes depends on the values, so a payload has room for a quarter more than the neediest
    rank wanted in the step before, which all ranks read from the payloads of all. If more is wanted than there is room,
    the encoder doubles the bound, and the edges between the classes with it, until it fits; what that loses stays in
    the residual. Where values are so much alike that none would be left, as many of them go as fit, the first ones.

    Attributes:
        bound: The error bound, a power of two.
        room: Bits a value, tags aside, that there is room for in the first step, and at most.
    """

    bound: float = 2.0**-10
    room: int = 16
    seen: Store | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (2.0**-126 <= self.bound <= 0.5 and math.frexp(self.bound)[0] == 0.5):
            raise ConfigurationError(
                f"bound={self.bound!r} is not possible; choose a power of two from 2**-126 to 0.5, for example 2**-10"
            )
        if not 1 <= self.room <= 32:
            raise ConfigurationError(
                f"room={self.room!r} is out of range; choose 1 to 32 bits a value, tags aside, usually 16"
            )

    def installed(self, store: Store, slots: Sequence[Slot], numel: int) -> Inceptionn:
        """With the store for the room that earlier payloads ask for."""
        return replace(self, seen=store)

    def payload_bytes(self, block: Block) -> int:
        """A head, a bit a segment, two bits a position, and the room."""
        rooms = np.array([self._room_of(slot.name) for slot in block.slots])
        bits = float((rooms[block.slot_of_run] * block.runs[:, 1]).sum()) if len(block.runs) else 0.0
        return inceptionn_payload_bytes(block, -(-math.ceil(bits) // 32) * 4)

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Writes tags and what they say, under the first bound that fits."""
        kernels.inceptionn_encode(block, feedback.source(gradient), payload, self._exponent)

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Sums what the tags say, and learns what the next step needs."""
        self.check(block, payloads)
        kernels.inceptionn_decode(block, payloads, out, weight, self._exponent)
        if self.seen is not None and block.numel:
            learn(payloads[:, 4:8].contiguous().view(torch.int32).max(), partial(self._heard, self.seen, block))

    def _heard(self, seen: Store, block: Block, words: Tensor) -> None:
        room = min(max(capacity.SPARE * 32 * int(words) / block.numel, LEAST * self.room), float(self.room))
        for slot in block.slots:
            seen.put(FIELD, slot.name, torch.tensor(room, dtype=torch.float64), Kind.SHARED)

    @property
    def _exponent(self) -> int:
        """``-log2(bound)``."""
        return 1 - math.frexp(self.bound)[1]

    def _room_of(self, name: str) -> float:
        """Bits a value of a parameter, as kept; the first step's if nothing is."""
        kept = None if self.seen is None else self.seen.get(FIELD, name)
        return float(self.room) if kept is None or not kept.item() else min(float(kept.item()), float(self.room))
