"""A flat gradient buffer, and who handles which of its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradwire.layout import Slot
from gradwire.methods import Method, Site
from gradwire.wire import Synchronization, late


@dataclass(frozen=True, eq=False)
class Share:
    """What one method does in a buffer.

    Attributes:
        method: The method.
        site: Where it works.
        state: What it made of the site.
        late: Whether its averages may come at the end of the step: so the dense ones of what is not compressed, which
            are small, and would hold up the next round of what is.
    """

    method: Method
    site: Site
    state: Any
    late: bool

    def synchronize(self, gradient: Tensor, step: int) -> Synchronization:
        """Starts the average of this share of a flat buffer, ``float32[numel]``, in place."""
        synchronization = self.method.synchronize(gradient, self.state, step)
        return late(synchronization) if self.late else synchronization


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
