"""Values of three levels, and their runs of zeros."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gradwire.layout import Block


class Trits(Protocol):
    """Values of three levels, and their runs of zeros."""

    def trits_payload_bytes(self, block: Block) -> int:
        """Size of a payload of trits."""
        ...

    def ternary_encode(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        payload: Tensor,
        clip: float,
        key: int,
    ) -> None:
        """TernGrad's trits: sent = scale * sign(t) with probability ``|t| / scale``, else 0."""
        ...

    def three_level_encode(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        payload: Tensor,
        sparsity: float,
    ) -> None:
        """3LC's trits: sent = scale * sign(t) where ``|t| > scale / 2``, with scale = sparsity * max ``|t|``."""
        ...

    def trits_decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """``out = weight * sum of the decoded payloads`` over the runs, summed in row order."""
        ...

    def zero_runs_encode(self, trits: Tensor, coded: Tensor) -> int:
        """Writes packed trits with their runs of zeros shortened to ``coded``, of at least their size.

        Returns how many bytes that took; PayloadError if a byte is not five trits.
        """
        ...

    def zero_runs_decode(self, coded: Tensor, trits: Tensor) -> int:
        """Reads all of ``coded`` to ``trits``, whose rest is zeros then, and returns how many bytes that made.

        PayloadError, and nothing written, unless an encoder can have written it, and has for no more than ``trits``.
        """
        ...
