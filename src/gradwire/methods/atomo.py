"""ATOMO with singular vectors."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.lowrank import gains
from gradwire.codecs.transform import Atoms
from gradwire.codecs.transform.atoms import variance_bound
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("atomo")
@dataclass(frozen=True, kw_only=True)
class Atomo(CodecMethod):
    """Singular triples of each matrix drawn with chances that grow with their size: unbiased, with least variance.

    Verified against the authors' code (hwang595/ATOMO): chances ``min(1, rank * sigma_i / sum)`` and division by them;
    the water-filling by which chances add up to ``rank`` is the paper's algorithm 1 as others implement it. Unlike
    there, exactly ``rank`` atoms are drawn, by systematic sampling, so that payloads have one size: chances stay what
    they are, and so does the variance, as atoms are orthogonal. Nor is nothing ever drawn, which the authors' code
    repeats, at the price of a bias. A convolution is the matrix of its first dimension by the others; there each row
    has the kernels of two pairs of channels: 2,048 by 18 for 64 by 64 channels and 3 by 3 places, 2,066 numbers an
    atom, where 64 by 576 have 640. Each step costs an eigendecomposition of the shorter side: seconds from some
    thousand rows and columns on.

    Attributes:
        rank: Atoms of each matrix, at least 1; the authors' scripts use 3.
    """

    citation = "Wang et al. 2018, arXiv:1806.04090"
    published = Published(
        "Exactly `rank` atoms are drawn of each matrix, where the paper's number varies about it. A convolution is the "
        "matrix of its first dimension by the others, in the authors' code one of far more rows than columns."
    )
    routes = ("gather",)
    granularities = ("layer",)
    why_granularity = "it decomposes one matrix at a time"
    memories = ("none", "momentum", "diana")
    bias = "unbiased"
    wire_bits = "32 * rank * (n + m)"

    rank: int = 3

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> Atoms:
        """Drawn atoms."""
        return Atoms(self.rank)

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Matrices that are larger than their atoms."""
        return gains(shape, self.rank)

    def error_bound(self, numel: int) -> float:
        """That of a square matrix whose singular values are all alike."""
        return variance_bound(numel, self.rank)
