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
    """QSGD with levels at zero and at powers of two of a segment's Euclidean norm, finer where most values are."""

    citation = "Ramezani-Kebrya et al. 2021, arXiv:2104.13818"
    published = Published(
        "Levels, norm and draws are the paper's; its authors' code has one more power on each side in place of zero. "
        "Elias coding is not here.",
        {"route": "gather"},
    )

    def code(self) -> codes.NUQSGD:
        """Zero and powers of two."""
        return codes.NUQSGD(self.bits)
