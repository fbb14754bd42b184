"""Signs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.code import Draws, Layout
from gradwire.kernels.reference._torch import pack, run_total, unpack


class Sign(NamedTuple):
    """The sign of every value and one scale a segment, the mean magnitude: ``(|t|_1 / d) sign(t)``, sign(0) = +1."""

    def check(self) -> None:
        """Has no parameters."""

    def layout(self, positions: int) -> Layout:
        """One bit a position and 4 bytes a segment."""
        return Layout(1, positions // 8)

    def measure(self, values: list[Tensor]) -> Tensor | None:
        """The mean magnitude."""
        total = sum(run_total(t.double().abs()) for t in values)
        return values[0].new_tensor([total / sum(map(len, values))]) if math.isfinite(total) else None

    def put(self, t: Tensor, scale: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """1 where negative."""
        return (t < 0).int(), torch.where(t < 0, -scale, scale)

    def pack(self, codes: Tensor) -> Tensor:
        """Eight bits a byte."""
        return pack(codes, 1)

    def read(self, body: Tensor, scales: Tensor) -> Tensor:
        """Scaled signs."""
        return torch.where(unpack(body, 1) == 1, -scales[:, 0], scales[:, 0])
