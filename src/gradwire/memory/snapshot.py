"""A second copy of what a store keeps, to go back to."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from gradwire.memory.store import Store


class Snapshot:
    """What a store kept at some moment; values that come from outside are left out.

    Copies are as large as the store's own allocations, so that taking one is a few copies and not one a parameter.

    Args:
        store: What is copied; nothing is until :meth:`take` is called.
        names: The parameters of which it is copied, whole allocations of the store's; None for all.
    """

    def __init__(self, store: Store, names: Collection[str] | None = None) -> None:
        self._store = store
        self._names = None if names is None else frozenset(names)
        self._layouts = -1
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._singles: dict[tuple[str, str], Tensor] = {}

    @property
    def current(self) -> bool:
        """Whether the store has laid out and loaded nothing since the last call of :meth:`take` or :meth:`extend`."""
        return self._layouts == self._store.layouts

    def take(self) -> None:
        """Copies everything that the store keeps now."""
        if not self.current:
            self._follow(torch.empty_like)
        for buffer, copy in self._buffers:
            copy.copy_(buffer)
        self._singles = {key: value.clone() for key, value in self._store.singles(self._names).items()}

    def extend(self) -> None:
        """Copies what the store has laid out since the last call, and leaves the other copies as they are."""
        self._follow(torch.clone)

    def restore(self) -> None:
        """Makes the store keep what it kept, bit for bit; what was put there since is dropped."""
        for buffer, copy in self._buffers:
            buffer.copy_(copy)
        for field, name in self._store.singles(self._names).keys() - self._singles.keys():
            self._store.drop(field, name)
        for (field, name), kept in self._singles.items():
            self._store.put(field, name, kept.clone())

    def _follow(self, copied: Callable[[Tensor], Tensor]) -> None:
        """Pairs each of the store's allocations with the copy there is, or with a new one."""
        known = {id(buffer): copy for buffer, copy in self._buffers}
        buffers = self._store.buffers(self._names)
        self._buffers = [(each, known[id(each)] if id(each) in known else copied(each)) for each in buffers]
        self._layouts = self._store.layouts
