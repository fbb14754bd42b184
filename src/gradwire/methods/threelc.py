"""3LC."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.quantize import ZeroRuns
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("3lc")
@dataclass(frozen=True, kw_only=True)
class ThreeLC(CodecMethod):
    """The nearest of zero and plus or minus ``sparsity * max|t|``, five a byte, with error feedback both ways.

    Runs of two to fourteen bytes of zeros take one byte. The paper's text and its authors' code were not at hand;
    rounding and bytes are as in a public implementation in NumPy. Google's in TensorFlow Federated has the same scale
    and lengths, but rounds at random and remembers nothing. Payloads are as long on every rank: from the second step on
    they have room for a quarter more than the neediest rank wanted in the step before, and at least half as much as in
    that step; what does not fit stays in the memory.

    Attributes:
        sparsity: In [1, 2): the larger, the more zeros. Only with 1 does it contract there and back without a memory.
    """

    citation = "Lim et al. 2019, arXiv:1802.07389"
    published = Published(
        "Payloads have room for what the step before wanted, so that all ranks know their size; what does not fit "
        "waits."
    )
    routes = ("sharded", "gather")
    memory = "residual"
    bias = "contractive"
    wire_bits = "2 * (8 * ceil(d / 5) + 64)"

    sparsity: float = 1.0

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> ZeroRuns:
        """Trits, zeros in runs."""
        return ZeroRuns(self.sparsity)

    def error_bound(self, numel: int) -> float:
        """What is just sent, half of ``sparsity`` times the largest, comes back as its square times the largest."""
        return (2 * self.sparsity - 1) ** 2

    def worker_bound(self, numel: int) -> float:
        """Rounding to the nearest of three values, zero among them, never adds to the error."""
        return 1.0
