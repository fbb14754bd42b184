"""DeMo: decoupled momentum."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.index import EliasFano
from gradwire.codecs.quantize import values
from gradwire.codecs.quantize.values import FloatValues, ValueCoding
from gradwire.codecs.select import Selector, TopMagnitudes
from gradwire.codecs.sparse import Sparse
from gradwire.codecs.transform import Chunks, chunk_block
from gradwire.codecs.transform.cosine import chunk_sides
from gradwire.deferred import known
from gradwire.errors import ConfigurationError
from gradwire.layout import Block, Int64Array
from gradwire.memory import Feedback, Residual
from gradwire.methods.method import Context, Method
from gradwire.methods.published import Published
from gradwire.methods.registry import register
from gradwire.wire.requests import AllGather, Synchronization


@dataclass(frozen=True)
class TopOfChunks(TopMagnitudes):
    """The same number of largest magnitudes of every segment.

    Attributes:
        count: How many.
    """

    ratio: float = 1.0
    count: int = 32

    def counts(self, block: Block) -> Int64Array:
        """``count``, or all of a smaller segment."""
        return np.minimum(block.segment_numels, self.count)


@dataclass(frozen=True, eq=False)
class _State:
    context: Context
    delta: Feedback
    chunks: list[Chunks]
    coefficients: Block


@register("demo")
@dataclass(frozen=True, kw_only=True)
class DeMo(Method):
    """Workers keep momenta of their own and send only the fast-moving parts of them; the average is their sign.

    ``delta = decay * delta + g``; in each chunk of ``delta`` the largest cosine coefficients are sent and taken away;
    a coefficient's average is over those workers that sent it; the gradient is the sign of the inverse transform.
    Use it with plain SGD.

    Verified against the authors' code (bloc97/DeMo): decay, chunk sizes, the transform, k, the mean over senders, the
    sign. There ``delta`` takes in ``lr * g``; a constant factor changes nothing under the sign, a schedule of the
    learning rate weighs old gradients otherwise. Here ``delta`` is kept as coefficients, which is the same for an
    orthonormal transform. There as here all tensors are taken, however small: a chunk of no more than ``topk`` values
    is sent whole. A chunk's sides divide the tensor's, as there: 53 by 59 is one chunk, 67 by 71 falls into single
    values, which are all sent; ``wire_bits`` is for sides that ``chunk`` divides. The momentum is the method's memory
    and takes no other; what is remembered and what is applied do not add up to the mean, because of decay, sign, and
    the mean over senders.

    Attributes:
        topk: Coefficients sent of each chunk.
        chunk: Longest side of a chunk, from 2 to 256.
        decay: Share of the momentum that stays each step, in [0, 1).
        sign: Whether the average is the sign; if not, what was decoded.
        values: How coefficients are written: ``"fp32"``, ``"fp16"``, ``"bf16"``, or an object.
    """

    citation = "Peng et al. 2024, arXiv:2411.19870"
    published = Published(
        "The authors' momentum takes in `lr * g`; here it is `g`, which differs where the learning rate changes."
    )
    routes = ("gather",)
    granularities = ("layer",)
    why_granularity = "it transforms chunks of one matrix at a time"
    memory = "none"
    memories = ("none",)
    takes_all = True
    why_no_mean = "a coefficient's average is over the workers that sent it, and has no magnitude but its sign's"
    bias = "biased"
    wire_bits = "topk * d / chunk**2 * (32 + 2 + log2(chunk**2 / topk))"

    topk: int = 32
    chunk: int = 64
    decay: float = 0.999
    sign: bool = True
    values: str | ValueCoding = "fp32"

    def __post_init__(self) -> None:
        if not (isinstance(self.topk, int) and self.topk >= 1):
            raise ConfigurationError(f"topk={self.topk!r} is out of range; choose a whole number >= 1, usually 32")
        if not (isinstance(self.chunk, int) and 2 <= self.chunk <= 256):
            raise ConfigurationError(f"chunk={self.chunk!r} is out of range; choose 2 to 256, usually 64")
        if not 0 <= self.decay < 1:
            raise ConfigurationError(f"decay={self.decay!r} is out of range; choose 0 <= decay < 1, usually 0.999")
        self.codec()

    def codec(self) -> Sparse:
        """The largest coefficients of each chunk."""
        select: Selector = TopOfChunks(count=self.topk)
        return Sparse(select, values.parse(self.values), EliasFano())

    def error_bound(self, numel: int) -> float:
        """Signs have no scale; without them, an orthonormal transform loses what it does not send."""
        return math.inf if self.sign or not isinstance(values.parse(self.values), FloatValues) else 1.0

    def declared_bits(self, n: int, m: int, workers: int = 1, *, learning: bool = False) -> float:
        """Of chunks whose sides divide those of a matrix; ``wire_bits`` takes them as long as they may be."""
        area = math.prod(chunk_sides((n, m), self.chunk))
        k = min(self.topk, area)
        return n * m / area * k * (32 + 2 + math.log2(area / k))

    def goes_on_from(self, former: Method) -> bool:
        """Coefficients of other chunks mean something else."""
        return isinstance(former, DeMo) and former.chunk == self.chunk

    def init(self, context: Context) -> _State:
        """Cuts chunks and finds the momenta."""
        chunks = [Chunks.of(slot, self.chunk) for slot in context.block.slots]
        delta = Residual(beta=self.decay).feedback(context.store, "delta", context.block.slots, context.numel)
        return _State(context, delta, chunks, chunk_block(chunks))

    def synchronize(self, gradient: Tensor, state: _State, step: int) -> Synchronization:
        """One round. The gradient's buffer holds its coefficients, then the average's."""
        codec, block = self.codec(), state.coefficients
        for chunks in state.chunks:
            chunks.transform(gradient)
        payload = torch.empty(codec.payload_bytes(block), dtype=torch.uint8, device=gradient.device)
        codec.encode(block, gradient, state.delta, payload, state.context.key(step))
        payloads = yield AllGather(payload)

        positions, coefficients, _ = codec.read(block, payloads)
        kernels.scatter_mean(block, positions, coefficients, gradient)
        for chunks in state.chunks:
            chunks.invert(gradient)
        if self.sign:
            finite = known(coefficients.isfinite().all())
            for part in state.context.block.parts(gradient):
                if finite:
                    part.sign_()
                else:
                    part.copy_(torch.where(part.isnan(), part, part.sign()))
