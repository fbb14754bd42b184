"""3LC."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.methods.method import CodecMethod
from gradwire.methods.registry import register
from gradwire.quantize import ThreeLevel


@register("3lc")
@dataclass(frozen=True, kw_only=True)
class ThreeLC(CodecMethod):
    """The nearest of zero and plus or minus ``sparsity * max|t|``, five a byte, with error feedback both ways.

    The paper then codes runs of zero bytes, which makes sizes depend on the data; that is left out here.

    Attributes:
        sparsity: In [1, 2): the larger, the more zeros.
    """

    citation = "Lim et al. 2019, arXiv:1802.07389"
    routes = ("sharded", "gather")
    memory = "residual"
    bias = "contractive"
    wire_bits = "8 * ceil(d / 5) + 32"

    sparsity: float = 1.0

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> ThreeLevel:
        """Five trits a byte."""
        return ThreeLevel(self.sparsity)

    def error_bound(self, numel: int) -> float:
        """Rounding to the nearest of three values, zero among them, never adds to the error."""
        return 1.0
