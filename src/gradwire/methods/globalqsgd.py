"""Global-QSGD."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.methods.method import Context, Method, Worker
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.routes import SharedLevels, integer
from gradwire.wire.requests import Synchronization


@register("globalqsgd")
@dataclass(frozen=True, kw_only=True)
class GlobalQSGD(Method):
    """Stochastic rounding against the largest magnitude of all workers, so that integers add up on the way.

    Linear dithering as in the authors' code, sands-lab/global-qsgd: one all-reduce of ``max |g|``, then one of integers
    that n workers' sum fits. There a worker rounds ``127 g / (n max)``, which upwards may exceed its share of the byte;
    here n workers have ``s = 127 // n`` levels each (``7 // n`` in four bits), and the sum never wraps. In four bits
    the code has 3 levels whatever n: its own tree cuts sums off at 15 and divides the last one by n, at random up or
    down, which suits four workers. It scales a whole DDP bucket, ``granularity="bucket"``. Exponential dithering, by
    powers of two, needs a reduction of its own and is not here. Of the paper only the abstract was at hand.

    Attributes:
        bits: Bits a value on the wire, for the sum: 8, for up to 127 workers, or 4, for up to 7.
    """

    citation = "Xin et al. 2023, arXiv:2305.18627"
    published = Published(
        "A scale for every layer loses less. In four bits n workers share 7 levels, in the authors' code each has 3. "
        "Exponential dithering is not here.",
        {"granularity": "bucket"},
    )
    routes = ("allreduce",)
    memories = ("none", "residual", "momentum", "ef21", "diana")
    bias = "unbiased"
    wire_bits = "bits * d + 32"

    bits: int = 8

    def __post_init__(self) -> None:
        self.code().levels_for(1)

    def code(self) -> SharedLevels:
        """As many levels as fit."""
        return SharedLevels(self.bits)

    def error_bound(self, numel: int) -> float:
        """Of one worker alone: d values on s levels have a quarter of ``d / s^2``."""
        return numel / (4 * self.code().levels_for(1) ** 2)

    def init(self, context: Context) -> Worker:
        """Sets up the memory.

        Raises:
            ConfigurationError: If the sums do not fit, or so many workers leave too few levels for the memory.
        """
        if self.code().levels_for(context.world_size) == 1 and not context.memory.bears("stays"):
            raise ConfigurationError(
                f"globalqsgd with bits={self.bits} has one level a side for {context.world_size} workers: "
                f"a value may be off by as much as the largest, and memory={context.memory} would grow without end; "
                "choose 'diana', 'none'" + (", or bits=8" if self.bits < 8 else "")
            )
        return Worker(context, context.feedback())

    def synchronize(self, gradient: Tensor, state: Worker, step: int) -> Synchronization:
        """Takes the integer route."""
        context = state.context
        return integer(self.code(), context.block, gradient, state.feedback, context.key(step), context.world_size)
