"""EDEN, and with one bit DRIVE."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs.transform import RotatedCentroids
from gradwire.methods.method import CodecMethod
from gradwire.methods.published import Published
from gradwire.methods.registry import register


@register("eden")
@dataclass(frozen=True, kw_only=True)
class EDEN(CodecMethod):
    """Randomly rotated values as the best centroids for normal ones, at a scale that keeps all along the gradient.

    With ``R`` a randomised Hadamard rotation, every coordinate of ``R x`` becomes the nearest centroid ``c``, and
    ``|x|^2 / <c, R x> R^-1 c`` is decoded. ``bits=1`` is DRIVE: signs, and the scale ``|x|_2^2 / |R x|_1``.

    Verified against the authors' code (amitport's two repositories): rotation, centroids, scale. There the whole vector
    is rotated, padded to a power of two; here pieces of ``rotation`` values, each with a scale, and the rest of a
    parameter in smaller ones. Fractions of bits are left out. For a uniformly random rotation the papers have no bias
    and an error of 0.571, 0.133 and 0.0096 at 1, 2 and 4 bits. One Hadamard rotation comes to the same for dense
    gradients, as tests show; of a vector with two or three values it is biased, so neither is claimed.

    Attributes:
        bits: Bits a value: 1, 2 or 4.
        rotation: Values that are rotated together, a power of two from 8 to 65536.
    """

    citation = "Vargaftik et al. 2022, EDEN, arXiv:2108.08842; 2021, DRIVE, arXiv:2105.08339"
    published = Published(
        "The papers are about the way there. Gathering costs n / 2 times as much at n workers. Owners write averages "
        "in as many bits: with 1 bit an error of 0.57, with 2 of 0.13, however many workers there are, unless "
        '`owner="qsgd:8"`, which takes 8 bits back.',
        {"route": "gather"},
    )
    routes = ("sharded", "gather")
    bias = "biased"
    wire_bits = "2 * (bits * d + 32 * (ceil(d / rotation) + log2(rotation) - 2))"

    bits: int = 4
    rotation: int = 4096

    def __post_init__(self) -> None:
        self.codec()

    def codec(self) -> RotatedCentroids:
        """Rotation and centroids."""
        return RotatedCentroids(self.bits, self.rotation)
