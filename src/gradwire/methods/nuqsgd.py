"""NUQSGD."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.kernels import codes
from gradwire.methods.published import Published
from gradwire.methods.qsgd import DrawnLevels
from gradwire.methods.registry import register


@register("nuqsgd")
@dataclass(frozen=True, kw_only=True)
class NUQSGD(DrawnLevels):
    """QSGD with levels at zero and at powers of two of a segment's Euclidean norm, finer where most values are.

    The authors' code (fartashf/nuqsgd) has blocks of 8,192 values in all runs that it comes with, 4 bits each. Of
    normal values these lose 0.34 of the square, blocks of 512 lose 0.09.
    """

    citation = "Ramezani-Kebrya et al. 2021, arXiv:1908.06077"
    published = Published(
        "Shorter blocks lose a quarter as much of normal values. Levels, norm and draws are the paper's; its authors' "
        "code has one more power on each side in place of zero. Elias coding is not here.",
        {"route": "gather", "granularity": "block:8192"},
    )

    def code(self) -> codes.NUQSGD:
        """Zero and powers of two."""
        return codes.NUQSGD(self.bits)
