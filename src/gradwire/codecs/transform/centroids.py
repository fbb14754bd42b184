"""Rotated values as the nearest of the centroids that suit normal coordinates best."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.codec import Codec
from gradwire.codecs.transform.hadamard import Rotation
from gradwire.errors import ConfigurationError
from gradwire.layout import Block
from gradwire.memory import Feedback
from gradwire.randomness import MASK32, run_keys

POSITIVE = {
    1: (0.7978846,),
    2: (0.4527800, 1.5104176),
    4: (0.1283950, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896),
}
"""By bits, the positive half of what minimises the mean square error of a normal variable (Lloyd; Max 1960)."""


@dataclass(frozen=True)
class RotatedCentroids(Codec):
    """Pieces of a block, each rotated at random and written as centroids and one scale.

    The scale of a piece ``x`` is ``|x|^2 / <c, R x>``, so that what is decoded has exactly ``|x|^2`` along ``x``. Every
    payload has a rotation of its own, which its first four bytes name, so that errors of workers cancel out.

    Attributes:
        bits: Bits a value: 1, 2 or 4.
        rotation: Values that are rotated together, a power of two from 8 to 65536.
    """

    bits: int = 4
    rotation: int = 4096

    def __post_init__(self) -> None:
        if self.bits not in POSITIVE:
            raise ConfigurationError(f"bits={self.bits!r} is not possible; choose 1, 2 or 4")
        if self.rotation not in [1 << power for power in range(3, 17)]:
            raise ConfigurationError(
                f"rotation={self.rotation!r} is not possible; choose a power of two from 8 to 65536, usually 4096"
            )

    def payload_bytes(self, block: Block) -> int:
        """4 bytes, 4 for each piece, and the codes."""
        return self._edges(block)[1] + -(-block.positions * self.bits // 32) * 4

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Writes the rotation's key, scales and codes."""
        head, edge = self._edges(block)
        stop = edge + block.positions * self.bits // 8
        payload[:head].view(torch.int32).fill_((key & MASK32) - ((key & 1 << 31) << 1))
        payload[stop:] = 0
        kernels.centroids_encode(
            _rotation(block, self.rotation).pieces,
            feedback.source(gradient),
            _table(self.bits, gradient.device),
            run_keys(key & MASK32, block.streams),
            payload[head:edge].view(torch.float32),
            payload[edge:stop],
        )

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Rotates each payload back."""
        self.check(block, payloads)
        head, edge = self._edges(block)
        stop = edge + block.positions * self.bits // 8
        for number, payload in enumerate(payloads.contiguous()):
            kernels.centroids_decode(
                _rotation(block, self.rotation).pieces,
                payload[head:edge].view(torch.float32),
                payload[edge:stop],
                _table(self.bits, out.device),
                payload[:4].view(torch.int32),
                block.streams,
                out,
                add=number > 0,
                weight=weight if number == len(payloads) - 1 else 1.0,
            )

    def _edges(self, block: Block) -> tuple[int, int]:
        """Where scales begin and end."""
        return 4, 4 + 4 * len(_rotation(block, self.rotation).pieces)


@lru_cache
def _table(bits: int, device: torch.device) -> Tensor:
    positive = torch.tensor(POSITIVE[bits], dtype=torch.float32)
    return torch.cat((-positive.flip(0), positive)).to(device)


@lru_cache(maxsize=4096)
def _rotation(block: Block, size: int) -> Rotation:
    return Rotation.of(block, size)
