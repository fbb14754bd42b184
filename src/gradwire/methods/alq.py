"""ALQ and AMQ: NUQSGD's levels, fitted to the gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.codecs.quantize import Quantiser
from gradwire.codecs.quantize.fitted import BINS, Counting, Magnitudes
from gradwire.deferred import learn
from gradwire.errors import ConfigurationError
from gradwire.kernels import codes
from gradwire.layout import Float64Array
from gradwire.memory import Kind, Remainder
from gradwire.methods.method import CodecState, Context, Method
from gradwire.methods.published import Published
from gradwire.methods.qsgd import DrawnLevels
from gradwire.methods.registry import register
from gradwire.wire.requests import AllReduceMean, Synchronization


@register("alq")
@dataclass(frozen=True, kw_only=True)
class ALQ(DrawnLevels):
    """QSGD with levels that coordinate descent fits to the gradients now and then, as shares of the Euclidean norm.

    Levels start as NUQSGD's. After steps 1, 2, 4, 8, … and every so many-th, workers average on the wire how often each
    share of a segment's norm came, weighted by the norm's square: 192 numbers, 1.5 kB. From that all find the same
    levels, the ones with the least expected error of unbiased rounding, by the paper's closed form for one level
    between its neighbours. A buffer has one set of levels, kept by parameter.

    Verified against the authors' code (Tabrizian/learning-to-quantize): levels, norm, closed form. There the
    distribution is a mixture of truncated normals, by mean, deviation and norm of the 20 to 350 largest blocks, the
    weight is the norm, levels are refitted after 100, 2,000 and each 10,000 steps, the model has one set of them, and
    there are 3 bits, without a level at zero. With 8 bits encoding takes a pass for each of 127 intervals, and is 20
    times slower than with 4.

    Attributes:
        every: Steps between two fits, once that many steps are over.
    """

    citation = "Faghri et al. 2020, arXiv:2010.12460"
    published = Published(
        "Levels are fitted to what was counted, not to truncated normals, after other steps; 3 bits cannot be packed. "
        "The authors' code has one more level on each side in place of zero.",
        {"route": "gather", "granularity": "block:8192"},
    )

    every: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.every, int) and self.every >= 1):
            raise ConfigurationError(f"every={self.every!r} is out of range; choose a whole number of steps >= 1")

    def code(self) -> codes.NonUniform:
        """What levels start from."""
        return codes.NonUniform.powers(self.bits)

    def fitted(self, magnitudes: Magnitudes) -> Float64Array:
        """As many levels as the bits can name."""
        return magnitudes.levels(1 << (self.bits - 1))

    def worker_bound(self, numel: int) -> float:
        """Whatever the levels are: with ``|x|_2 = 1``, ``(u - x) (x - l) <= x - x**2``, and ``|x|_1 <= sqrt(d)``."""
        return math.sqrt(numel) - 1

    def remainder(self, most: int) -> Remainder:
        """Some levels leave more than there was."""
        return "grows"

    def goes_on_from(self, former: Method) -> bool:
        """Other bits have other levels."""
        return isinstance(former, type(self)) and former.bits == self.bits

    def init(self, context: Context) -> CodecState:
        """Finds the levels."""
        first = torch.tensor(self.code().levels, dtype=torch.float32)
        names = [slot.name for slot in context.block.slots]
        context.store.stacked("levels", names, lambda _: first, Kind.SHARED, first.device)
        return super().init(context)

    def synchronize(self, gradient: Tensor, state: CodecState, step: int) -> Synchronization:
        """Takes the chosen route, and where levels are fitted averages counts after it."""
        store, slots = state.context.store, state.context.block.slots
        kept = [levels for slot in slots if (levels := store.get("levels", slot.name)) is not None]
        code = codes.NonUniform(self.bits, tuple(kept[0].tolist()))
        if step == 0 or step % (self.every if step >= self.every else 1 << (step.bit_length() - 1)):
            yield from super().synchronize(gradient, replace(state, worker=Quantiser(code)), step)
            return
        counts = torch.zeros(BINS, dtype=torch.float64, device=gradient.device)
        yield from super().synchronize(gradient, replace(state, worker=Counting(code, counts=counts)), step)

        def fit(counts: Tensor) -> None:
            if counts.isfinite().all() and counts.min() >= 0 and counts.max() > 0:
                found = torch.from_numpy(self.fitted(Magnitudes((counts / counts.max()).numpy()))).float()
                if (found.diff() > 0).all():
                    for levels in kept:
                        levels.copy_(found)

        learn((yield AllReduceMean(counts)), fit)


@register("amq")
@dataclass(frozen=True, kw_only=True)
class AMQ(ALQ):
    """NUQSGD with powers of a multiplier in place of 1/2, fitted to the gradients now and then.

    Counts are averaged as for ``alq``. Of all multiples of 1/512 the one with the least expected error is taken; the
    authors descend along its gradient from eight starts.
    """

    def fitted(self, magnitudes: Magnitudes) -> Float64Array:
        """Zero, and powers."""
        return magnitudes.powers(1 << (self.bits - 1))
