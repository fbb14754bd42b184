"""What nobody takes goes back to where it came from: averages of parameters that took no part in a step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gradwire.deferred import placed
from gradwire.engine.guards.guard import Guard
from gradwire.engine.unit import Unit
from gradwire.layout import Slot
from gradwire.wire import Synchronization
from gradwire.wire.requests import AllReduceMean


class Unused(Guard):
    """Gives averages back to the memories that sent them, where the gradients' owner is going to throw them away.

    DDP does that with ``find_unused_parameters=True`` and a parameter that no rank used in the step, though compression
    may have sent what it owed to it from earlier steps; FSDP2 leaves a group alone that takes no part. The parameter's
    gradient is then left as it was, and what is owed waits for the next step that uses it. Where it is no zero, but an
    average that was not cleared, DDP brings it along; it is taken out of what is owed, or it would count once more.

    Args:
        give_back: Puts a slot's average back; on the wire's thread.
        ask: Whether a parameter may have been used on other ranks. If not, ``names`` is the same on all.

    Attributes:
        names: The parameters that this rank did not use in the step under way; added by whoever asks for averages.
        elsewhere: Those of them that others used, whose averages stay.
    """

    def __init__(self, give_back: Callable[[Slot, Tensor], None], *, ask: bool) -> None:
        self._give_back = give_back
        self._ask = ask
        self._used: dict[Unit, Tensor] = {}
        self._brought: dict[str, Tensor] = {}
        self.names: set[str] = set()
        self.elsewhere: set[str] = set()

    def before_step(self) -> None:
        """Forgets the step before."""
        self.elsewhere = set()

    def before_encode(self, unit: Unit, gradient: Tensor) -> None:
        """Keeps what was brought of parameters that this rank did not use."""
        for slot in unit.slots if self.names else ():
            if slot.name in self.names:
                self._brought[slot.name] = gradient[slot.offset : slot.stop].clone()

    def beside(self, unit: Unit, gradient: Tensor) -> list[Synchronization]:
        """Asks which parameters anybody used."""
        return [self._share(unit, gradient.device)] if self._ask else []

    def _share(self, unit: Unit, device: torch.device) -> Synchronization:
        used = np.array([slot.name not in self.names for slot in unit.slots], dtype=np.float32)
        self._used[unit] = yield AllReduceMean(placed(used, device), beside=True)

    def after_decode(self, unit: Unit, average: Tensor) -> None:
        """Gives back, and hands on zeros; the host waits for a device only if something was not used here."""
        used = self._used.pop(unit, None)
        if not self.names:
            return
        mine = [(number, slot) for number, slot in enumerate(unit.slots) if slot.name in self.names]
        for number, slot in mine:
            self.names.discard(slot.name)
            brought = self._brought.pop(slot.name, None)
            if used is None or not used[number]:
                part = average[slot.offset : slot.stop]
                self._give_back(slot, part if brought is None else part - brought)
                part.zero_()
            else:
                self.elsewhere.add(slot.name)
