"""Gradient sparsification in proportion to magnitudes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradwire.codecs import index
from gradwire.codecs.adaptive import AdaptiveSparse
from gradwire.codecs.index import IndexCoding
from gradwire.codecs.select import Proportional, count_for
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("gspar")
@dataclass(frozen=True, kw_only=True)
class GSpar(CodecMethod):
    """About k coordinates of each segment, drawn by their magnitudes: unbiased, with nearly the least variance.

    A magnitude m goes with probability ``p = min(m / T, 1)``, as ``m / p``; that is T, unless it is larger and goes for
    certain. T starts at ``(sum of magnitudes) / k`` and falls, round by round, to where the p add up to k. Only the
    number expected is k: a payload has room for 6 standard deviations more, beyond which the smallest would be dropped.

    Attributes:
        ratio: k as a share of a segment's elements, in (0, 1].
        rounds: How often T is brought nearer, each a pass over the gradient.
        indices: How indices are written, as for ``topk``.
    """

    citation = "Wangni et al. 2018, arXiv:1710.09854 (GSpar, its greedy algorithm)"
    published = Published(
        "What goes as T takes one bit in the paper, which counts its bits; here values are floats, for a payload's "
        "size is known before the values are."
    )
    routes = ("gather",)
    memories: ClassVar[tuple[str, ...]] = ("none", "momentum", "diana")
    bias = "unbiased"
    wire_bits = "32 + min(d, k + 6 * sqrt(k) + 7) * (32 + 2 + log2(max(1, d / k)))"

    ratio: float = 0.01
    rounds: int = 2
    indices: str | IndexCoding = "elias-fano"

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> AdaptiveSparse:
        """Criterion and index coding."""
        return AdaptiveSparse(Proportional(self.ratio, self.rounds), 1.0, indices=index.parse(self.indices))

    def error_bound(self, numel: int) -> float:
        """``d / k``, for magnitudes that are all alike."""
        return numel / count_for(numel, self.ratio)
