"""Codes that all-reduces can add up."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gradwire.layout import Block


class Integer(Protocol):
    """Codes that all-reduces can add up."""

    def integer_scales(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        bucket: int,
        scales: Tensor,
    ) -> None:
        """The largest ``|t|`` of each bucket, infinity where any ``t`` is not finite; leaves ``t`` in the residual."""
        ...

    def integer_encode(
        self,
        block: Block,
        values: Tensor,
        subtract: bool,
        scales: Tensor,
        levels: int,
        bits: int,
        bucket: int,
        codes: Tensor,
        key: int,
    ) -> None:
        """Codes of ``bits`` bits, ``levels`` of them on each side of zero; with ``subtract`` takes them from values."""
        ...

    def integer_decode(
        self,
        block: Block,
        scales: Tensor,
        codes: Tensor,
        out: Tensor,
        levels: int,
        bits: int,
        bucket: int,
        workers: int,
    ) -> None:
        """``out`` = what codes added up over ``workers`` stand for, divided by their number."""
        ...
