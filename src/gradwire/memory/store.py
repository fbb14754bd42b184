"""Tensors that outlive a step, kept by parameter name, laid out as kernels want them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.layout import Slot
from gradwire.memory.kind import Kind

Tensors = dict[str, dict[str, Tensor]]
"""Field name, then parameter name, to tensor."""


def _zero(name: str) -> Tensor:
    return torch.zeros((), dtype=torch.float32)


class Store:
    """Named tensors as views of larger allocations.

    When parameters are bucketed anew, the same names are asked for in another layout; the store then moves their
    values there, so what is remembered of a parameter never depends on its bucket.

    Every field is of a :class:`~gradwire.memory.Kind`, ``Kind.MEAN`` where none is given, which says what becomes of it
    when the number of workers changes.

    Args:
        device: Where the tensors live.

    Attributes:
        device: As given.
        layouts: Counts how often tensors were laid out or loaded.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._views: Tensors = {}
        self._buffers: Tensors = {}
        self.layouts = 0
        self._kinds: dict[str, Kind] = {}
        self._firsts: dict[tuple[str, str], Callable[[str], Tensor]] = {}
        self._scratch: dict[str, Tensor] = {}

    def flat(
        self,
        field: str,
        slots: Sequence[Slot],
        numel: int,
        kind: Kind = Kind.MEAN,
        dtype: torch.dtype = torch.float32,
        fits: bool = False,
    ) -> Tensor:
        """A buffer of ``numel`` elements that keeps every slot's values under ``field``; zeros at first.

        What was kept with more or fewer rows is fitted if told so, as by :meth:`stacked`.
        """
        buffer = self._zeros(numel, dtype)
        for slot in slots:
            if fits:
                self._fit(field, slot.name, buffer[slot.offset : slot.stop].view(slot.shape))
            self._keep(field, slot.name, buffer[slot.offset : slot.stop].view(slot.shape), buffer, _zero, kind)
        self.layouts += 1
        return buffer

    def _zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def scratch(self, numel: int, purpose: str = "") -> Tensor:
        """A float32 buffer that shares its memory with others of its purpose: who writes to it may not let them run."""
        kept = self._scratch.get(purpose)
        had = 0 if kept is None else kept.numel()
        if kept is None or had < numel:  # what a kernel has read by NumPy can never grow
            kept = self._scratch[purpose] = torch.empty(max(numel, 2 * had), dtype=torch.float32, device=self.device)
        return kept[:numel]

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of what such buffers share now."""
        return sum(each.nbytes for each in self._scratch.values())

    def renew_scratch(self) -> None:
        """The next one shares no memory with those before, which they keep for as long as they are in use."""
        self._scratch.clear()

    def stacked(
        self,
        field: str,
        names: Sequence[str],
        first: Callable[[str], Tensor],
        kind: Kind = Kind.MEAN,
        device: torch.device | None = None,
    ) -> Tensor:
        """Tensors of one shape stacked along a new first dimension, ``first(name)`` for those not yet kept.

        Of one that was kept with more rows the first ones stay, and one with fewer gets the rest of ``first(name)``.
        They live on the store's device if none is given.
        """
        stack = torch.stack([first(name) for name in names]).to(device or self.device)
        for name, view in zip(names, stack, strict=True):
            self._fit(field, name, view)
            self._keep(field, name, view, stack, first, kind)
        self.layouts += 1
        return stack

    def stacks(self, field: str) -> list[Tensor]:
        """The allocations in which a field lies."""
        return list({id(buffer): buffer for buffer in self._buffers.get(field, {}).values()}.values())

    def get(self, field: str, name: str) -> Tensor | None:
        """What is kept of one parameter, if anything."""
        return self._views.get(field, {}).get(name)

    def fields(self, name: str) -> list[str]:
        """What is kept of one parameter, by field."""
        return [field for field, views in self._views.items() if name in views]

    def put(self, field: str, name: str, value: Tensor, kind: Kind = Kind.MEAN) -> None:
        """Keeps a tensor of one parameter in place of what was kept; the kind counts where the field is new."""
        self._kinds.setdefault(field, kind)
        self._views.setdefault(field, {})[name] = value
        self._buffers.get(field, {}).pop(name, None)

    def drop(self, field: str, name: str) -> None:
        """Keeps nothing of one parameter any more."""
        del self._views[field][name]
        if not self._views[field]:
            del self._views[field]
        self._buffers.get(field, {}).pop(name, None)

    def retain(self, goes_on: Callable[[str, str], bool]) -> None:
        """Keeps nothing but what goes on, by field and parameter name, and what is given; the next layout takes it in.

        Nothing counts as laid out any more.
        """
        for field, views in [*self._views.items()]:
            if self._kinds[field] != Kind.GIVEN:
                for name in [name for name in views if not goes_on(field, name)]:
                    self.drop(field, name)
            if field not in self._views:
                del self._kinds[field]
                self._buffers.pop(field, None)
        self._firsts.clear()
        self.layouts += 1

    def clear(self, kind: Kind) -> None:
        """Sets everything of a kind to zero."""
        for field, views in self._views.items():
            if self._kinds[field] == kind:
                for view in views.values():
                    view.zero_()

    def buffers(self, names: Collection[str] | None = None) -> list[Tensor]:
        """The allocations that :meth:`flat` and :meth:`stacked` made and that are still in use, but what is given.

        Args:
            names: The parameters that they keep something of; None for all.
        """
        kept = [
            buffer
            for field, buffers in self._buffers.items()
            if self._kinds[field] != Kind.GIVEN
            for name, buffer in buffers.items()
            if names is None or name in names
        ]
        return list({id(buffer): buffer for buffer in kept}.values())

    def singles(self, names: Collection[str] | None = None) -> dict[tuple[str, str], Tensor]:
        """What lies in no such allocation because it was :meth:`put` or loaded, by field and parameter name.

        Args:
            names: The parameters that it is kept of; None for all.
        """
        return {
            (field, name): value
            for field, views in self._views.items()
            if self._kinds[field] != Kind.GIVEN
            for name, value in views.items()
            if name not in self._buffers.get(field, {}) and (names is None or name in names)
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept, but what is given."""
        return sum(each.nbytes for each in (*self.buffers(), *self.singles().values()))

    def state(self) -> Tensors:
        """A copy of everything kept, on the CPU."""
        return {
            field: {name: view.detach().to("cpu", copy=True) for name, view in views.items()}
            for field, views in self._views.items()
        }

    def kinds(self) -> dict[str, str]:
        """Whose each field is, as plain text."""
        return {field: str(self._kinds[field]) for field in self._views}

    def check(self, state: Mapping[str, Mapping[str, Tensor]], complete: bool) -> None:
        """Compares a state with what is laid out here.

        Args:
            state: What :meth:`state` gave.
            complete: Whether the state must have all that is laid out here.

        Raises:
            ConfigurationError: If a tensor is missing, or has another shape or dtype.
        """
        for field, name in self._firsts:
            kept, value = self._views[field][name], state.get(field, {}).get(name)
            if value is None and complete:
                raise ConfigurationError(
                    f"the state lacks {field} of {name!r}; load a whole state of the same model and method"
                )
            if value is not None and (value.shape, value.dtype) != (kept.shape, kept.dtype):
                raise ConfigurationError(
                    f"the state's {field} of {name!r} has shape {tuple(value.shape)} and dtype {value.dtype}, this "
                    f"model's has {tuple(kept.shape)} and {kept.dtype}; load a state saved from the same model, method "
                    "and world size"
                )

    def load(self, state: Mapping[str, Mapping[str, Tensor]], kinds: Mapping[str, str]) -> None:
        """Replaces everything kept by a checked state; tensors asked for later start from what is loaded."""
        for field, views in self._views.items():
            for name in [name for name in views if name not in state.get(field, {})]:
                if (field, name) in self._firsts:
                    views[name].copy_(self._firsts[field, name](name))
                else:
                    del views[name]
        for field, values in state.items():
            self._kinds[field] = Kind(kinds[field])
            for name, value in values.items():
                if (field, name) in self._firsts:
                    self._views[field][name].copy_(value)
                else:
                    self._views.setdefault(field, {})[name] = value.detach().to(self.device, copy=True)
        self.layouts += 1

    def _fit(self, field: str, name: str, view: Tensor) -> None:
        """Gives what is kept as many rows as it is to have now: the first of them, or further ones as they begin."""
        kept = self.get(field, name)
        if kept is not None and len(kept.shape) > 1 and len(kept) != len(view) and kept.shape[1:] == view.shape[1:]:
            fitted = view.clone()
            rows = min(len(kept), len(view))
            fitted[:rows] = kept[:rows]
            self.put(field, name, fitted)

    def _keep(
        self,
        field: str,
        name: str,
        view: Tensor,
        buffer: Tensor,
        first: Callable[[str], Tensor],
        kind: Kind,
    ) -> None:
        views = self._views.setdefault(field, {})
        if (known := self._kinds.setdefault(field, kind)) != kind:
            raise ConfigurationError(
                f"{field} of {name!r} is of kind {kind}, that of others of kind {known}, so no state could be saved; "
                "choose one route for all methods that keep it"
            )
        self._firsts[field, name] = first
        if (former := views.get(name)) is not None:
            if former.shape != view.shape:
                raise ConfigurationError(
                    f"the kept {field} of {name!r} has shape {tuple(former.shape)}, the model now asks for "
                    f"{tuple(view.shape)}; load a state saved from the same model, method and world size"
                )
            view.copy_(former)
        views[name] = view
        self._buffers.setdefault(field, {})[name] = buffer
