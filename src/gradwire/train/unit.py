"""A flat gradient buffer, and who handles which of its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradwire.layout import Slot
from gradwire.methods import Method, Site


@dataclass(frozen=True, eq=False)
class Share:
    """What one method does in a buffer.

    Attributes:
        method: The method.
        site: Where it works.
        state: What it made of the site.
    """

    method: Method
    site: Site
    state: Any


@dataclass(frozen=True, eq=False)
class Unit:
    """A flat buffer that is averaged at once.

    Attributes:
        slots: All parameters, back to back.
        numel: Elements of the buffer.
        shares: The compressing method's share, and the dense one's, where there are any.
    """

    slots: tuple[Slot, ...]
    numel: int
    shares: tuple[Share, ...]
