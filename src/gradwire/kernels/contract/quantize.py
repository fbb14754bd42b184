"""Values in a few bits. Every decoder gives ``out = weight * sum of the decoded payloads``, in row order."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gradwire.layout import Block


class Quantize(Protocol):
    """Values in a few bits. Every decoder gives ``out = weight * sum of the decoded payloads``, in row order."""

    def sign_payload_bytes(self, block: Block) -> int:
        """Size of a sign payload."""
        ...

    def sign_encode(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        payload: Tensor,
        euclidean: bool = False,
    ) -> None:
        """One bit a position and one scale a segment: sent = scale * sign(t), sign(0) = +1.

        The scale is the mean of ``|t|``, or with ``euclidean`` the root mean square of ``t``.
        """
        ...

    def sign_decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """``out = weight * sum of the decoded payloads`` over the runs, summed in row order."""
        ...

    def vote_encode(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        payload: Tensor,
        key: int,
    ) -> None:
        """A sign payload with all scales 1: sent = sign(t), where a zero takes a random sign."""
        ...

    def two_means_payload_bytes(self, block: Block) -> int:
        """Size of a two-means payload."""
        ...

    def two_means_encode(
        self, block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float, payload: Tensor
    ) -> None:
        """One bit a position and two means a segment: sent = mean of the values on the same side of zero."""
        ...

    def two_means_decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """``out = weight * sum of the decoded payloads`` over the runs, summed in row order."""
        ...

    def stochastic_payload_bytes(self, block: Block, bits: int, bucket: int) -> int:
        """Size of a stochastic payload; ``bucket`` 0 means one scale a segment."""
        ...

    def stochastic_encode(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        payload: Tensor,
        bits: int,
        bucket: int,
        euclidean: bool,
        key: int,
        nearest: bool = False,
    ) -> None:
        """QSGD levels of ``bits`` bits (sign included) against the norm of each ``bucket`` elements of a segment.

        With ``nearest`` no level is drawn: the nearest one is taken.
        """
        ...

    def stochastic_decode(
        self, block: Block, payloads: Tensor, out: Tensor, weight: float, bits: int, bucket: int
    ) -> None:
        """``out = weight * sum of the decoded payloads`` over the runs, summed in row order."""
        ...

    def power_of_two_payload_bytes(self, block: Block, bits: int) -> int:
        """Size of a payload of powers of two, of 8 or 9 bits a position."""
        ...

    def power_of_two_encode(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        payload: Tensor,
        bits: int,
        key: int,
    ) -> None:
        """Natural compression: sent = one of the two powers of two around t, right on average."""
        ...

    def power_of_two_decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float, bits: int) -> None:
        """``out = weight * sum of the decoded payloads`` over the runs, summed in row order."""
        ...

    def dynamic_payload_bytes(self, block: Block) -> int:
        """Size of a payload of table entries."""
        ...

    def dynamic_encode(
        self, block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float, payload: Tensor
    ) -> None:
        """The 8-bit dynamic tree: sent = the nearest entry of its table times the largest magnitude of a segment."""
        ...

    def dynamic_decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """``out = weight * sum of the decoded payloads`` over the runs, summed in row order."""
        ...

    def exponent_payload_bytes(self, block: Block) -> int:
        """Size of a payload of 4-bit exponents."""
        ...

    def exponent_encode(
        self, block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float, payload: Tensor
    ) -> None:
        """Sent = the nearest of the seven powers of two below the largest ``|t|`` of a segment, or 0, with the sign."""
        ...

    def exponent_decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """``out = weight * sum of the decoded payloads`` over the runs, summed in row order."""
        ...

    def quantile_payload_bytes(self, block: Block, buckets: int, rows: int, columns: float, groups: int) -> int:
        """Size of a quantile payload; ``rows`` 0 means no sketch, and then ``groups`` mean nothing."""
        ...

    def quantile_encode(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        payload: Tensor,
        buckets: int,
        rows: int,
        columns: float,
        groups: int,
        key: int,
    ) -> None:
        """Means of equally filled buckets, and each value's bucket, or its group and a MinMaxSketch for each group."""
        ...

    def quantile_decode(
        self,
        block: Block,
        payloads: Tensor,
        out: Tensor,
        weight: float,
        buckets: int,
        rows: int,
        columns: float,
        groups: int,
    ) -> None:
        """``out = weight * sum of the decoded payloads`` over the runs, summed in row order."""
        ...

    def inceptionn_payload_bytes(self, block: Block, room: int) -> int:
        """Size of an INCEPTIONN payload with room for ``room`` bytes of values, a multiple of 4."""
        ...

    def inceptionn_encode(
        self,
        block: Block,
        gradient: Tensor,
        residual: Tensor | None,
        beta: float,
        gamma: float,
        payload: Tensor,
        bound: int,
    ) -> None:
        """Shifted mantissas, cut off below ``2**-bound``; the bound is doubled until they fit the payload."""
        ...

    def inceptionn_decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float, bound: int) -> None:
        """``out = weight * sum of the decoded payloads`` over the runs, in row order; PayloadError unless sound."""
        ...
