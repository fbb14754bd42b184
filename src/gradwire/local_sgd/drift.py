"""What averages left is the same on all ranks: digests, compared from time to time, hold them to it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradwire.engine.guards import Guard
from gradwire.engine.guards.digest import compared
from gradwire.engine.unit import Unit
from gradwire.local_sgd.beside import Beside
from gradwire.local_sgd.fragments import Fragment
from gradwire.wire import Synchronization
from gradwire.wire.checked import checksum_of


class Drift(Guard):
    """Compares digests of what a fragment's averages left, over all ranks, along with its next average.

    Whatever parts the ranks stays in what is compared: an average that is not the same everywhere, an outer optimizer
    that steps differently, memory that fails, or states that do not belong together. So it is found by the next
    comparison, however many averages there are between two, and the last average by :meth:`compare`.

    Args:
        fragments: What is averaged.
        beside: What goes along with it.
        every: Averages of a fragment from one comparison to the next, beginning with the first.
    """

    def __init__(self, fragments: Sequence[Fragment], beside: Sequence[Beside], every: int) -> None:
        self._fragments = {fragment.pieces[0].name: fragment for fragment in fragments}
        self._beside = beside
        self._every = every
        self._begun = dict.fromkeys(self._fragments, 0)

    def beside(self, unit: Unit, gradient: Tensor) -> list[Synchronization]:
        """Sends digests with the first stretch of a fragment."""
        first = unit.slots[0].name
        if first not in self._fragments:
            return []
        begun = self._begun[first]
        self._begun[first] += 1
        return [] if begun % self._every else [self._compare(self._fragments[first])]

    def compare(self) -> list[Synchronization]:
        """Compares what the last averages of all fragments left."""
        return [self._compare(fragment) for fragment in self._fragments.values()]

    def _compare(self, fragment: Fragment) -> Synchronization:
        shared = dict(fragment.named(fragment.anchor))
        for each in self._beside:
            shared.update(each.shared(fragment))
        what = f"after {fragment.rounds} averages of fragment {fragment.number} what they left is"
        digests = {name: checksum_of(values) for name, values in shared.items()}
        return compared(what, digests)
