"""THC: tensor homomorphic compression."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.transform import Levels, Rotation
from gradwire.codecs.transform.hadamard import CODES
from gradwire.deferred import expect, known
from gradwire.errors import ConfigurationError, PayloadError
from gradwire.memory import Feedback
from gradwire.methods.method import Context, Method
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.routes import Shards, check_largest
from gradwire.wire.requests import AllGather, AllReduceMax, AllToAll, Synchronization


@dataclass(frozen=True, eq=False)
class _State:
    context: Context
    feedback: Feedback
    rotations: tuple[Rotation, ...]


@register("thc")
@dataclass(frozen=True, kw_only=True)
class THC(Method):
    """4-bit codes whose integers add up, so that whoever averages them neither decodes nor compresses again.

    Each piece of the gradient is rotated by a randomised Hadamard transform, scaled by the largest norm of all workers,
    clamped, and rounded without bias to 16 levels that a table of integers spaces for normal coordinates. On the
    sharded route, the paper's parameter server, the owner of a share adds up the table's integers and returns their
    sums, in 8 bits while ``n * grain`` fits and in 16 beyond: 12 or 20 bits a value in all, and no second rounding. On
    the gather route everyone adds up all codes: 4 (n - 1) bits, less for two workers and equal for three.

    Verified against the authors' code (SophiaLi06/BytePS_THC), not the paper's text: feedback, random signs and
    rotation of 1024 values at a time, scale by the largest norm, clamping at the share ``overflow`` = 1/32, ``grain`` =
    30, 4 bits to the server and sums in 8 on the way back. The table, computed here for the variance the paper
    minimises, is theirs at every ``overflow`` that they have one for with grains of 30 and 34; at 16 theirs names one
    level twice. There one norm scales a partition of the server's, up to ``2**20`` values of all parameters laid end to
    end, and signs are the same at every step; here each rotated piece has its own norm, and each step its signs. There
    values are rounded to a grid of 1,001 points first and to levels then, here at once. Clamping makes it biased
    without a memory.

    Attributes:
        grain: Largest integer of the table, the paper's granularity, from 15 to 255.
        overflow: Share of coordinates that is clamped.
        rotation: Values that are rotated together, a power of two from 8 to 65536.
    """

    citation = "Li et al. 2024, arXiv:2302.08545"
    published = Published(
        "Longer rotations have fewer norms. Every rotation has a norm of its own, there up to `2**20` values have one.",
        {"rotation": 1024},
    )
    routes = ("sharded", "gather")
    memory = "residual"
    memories = ("residual", "none", "momentum", "ef21")
    bias = "biased"
    wire_bits = "(4 + (8 if workers * grain < 256 else 16)) * d + 32 * (ceil(d / rotation) + log2(rotation) - 3)"

    grain: int = 30
    overflow: float = 1 / 32
    rotation: int = 4096

    def __post_init__(self) -> None:
        self._levels()
        if self.rotation not in [1 << power for power in range(3, 17)]:
            raise ConfigurationError(
                f"rotation={self.rotation!r} is not possible; choose a power of two from 8 to 65536, usually 4096"
            )

    def _levels(self) -> Levels:
        return Levels(self.grain, self.overflow)

    def error_bound(self, numel: int) -> float:
        """What is clamped loses less than itself; what is rounded, at most a quarter of the widest gap squared."""
        return 1 + self._levels().widest ** 2 / 4

    def init(self, context: Context) -> _State:
        """Sets up the memory, and the pieces of each owner's share.

        Raises:
            ConfigurationError: If so many workers' sums do not fit 16 bits.
        """
        most = 0xFFFF // context.world_size
        if self.grain > most:
            remedy = f"grain={most} or less" if most >= CODES - 1 else "another method, such as 'eden'"
            raise ConfigurationError(
                f"{context.world_size} workers' integers up to grain={self.grain} do not fit 16 bits when they are "
                f"added; choose {remedy}"
            )
        blocks = (
            Shards.of(context.block, context.rank, context.world_size).all
            if context.route == "sharded"
            else (context.block,)
        )
        return _State(context, context.feedback(), tuple(Rotation.of(block, self.rotation) for block in blocks))

    def synchronize(self, gradient: Tensor, state: _State, step: int) -> Synchronization:
        """Norms, codes, and on the sharded route sums. Norms that are not finite mark what is not."""
        context, feedback, levels, device = state.context, state.feedback, self._levels(), gradient.device
        shared, own = context.shared_key(step), context.key(step)
        admitted = feedback.before_encode(context.block, gradient)
        values, finite = feedback.compensate(context.block, admitted)
        norms = torch.cat([rotation.scales(values) for rotation in state.rotations])
        if not known(finite):
            norms.masked_fill_(~finite, torch.inf)
        largest = yield AllReduceMax(norms.clone())
        check_largest(largest, norms)

        scales = largest.split([len(rotation.pieces) for rotation in state.rotations])
        sizes = [rotation.payload_bytes for rotation in state.rotations]
        codes = torch.zeros((len(sizes), max(sizes)), dtype=torch.uint8, device=device)
        for rotation, scale, size, row in zip(state.rotations, scales, sizes, codes, strict=True):
            rotation.encode(values, feedback.residual, scale, levels, shared, own, row[:size])
        feedback.after_encode(context.block, admitted)
        if context.route == "sharded":
            incoming = yield AllToAll(codes)
            sums = yield AllGather(self._sums(incoming, context.world_size), straight=True)
        else:
            sums = self._sums((yield AllGather(codes[0])), context.world_size)[None]

        self._check(sums, context.world_size)
        width = self._sum_bytes(context.world_size)
        for rotation, scale, size, row in zip(state.rotations, scales, sizes, sums, strict=True):
            rotation.decode(row[: 2 * width * size], context.world_size, scale, levels, shared, gradient)
        feedback.after_decode(context.block, gradient)

    def _sum_bytes(self, world_size: int) -> int:
        return 1 if world_size * self.grain <= 0xFF else 2

    def _sums(self, codes: Tensor, world_size: int) -> Tensor:
        """The integers of all workers' codes, added up."""
        sums = torch.empty(2 * codes.shape[1] * self._sum_bytes(world_size), dtype=torch.uint8, device=codes.device)
        kernels.rotated_sums(codes, self._levels().tensor(codes.device), sums)
        return sums

    def _check(self, sums: Tensor, world_size: int) -> None:
        """Raises PayloadError if a sum is more than all workers together can have sent."""
        if not sums.numel():
            return
        if self._sum_bytes(world_size) == 1:
            largest = sums.max()
        else:
            high = sums[:, 1::2].to(torch.int32)
            largest = (high << 8).add_(sums[:, ::2]).max()
        expect(
            largest <= world_size * self.grain,
            lambda: PayloadError(
                f"a sum of {int(largest)} came from {world_size} workers whose largest integer is {self.grain}; "
                "do all ranks run the same method?"
            ),
        )
