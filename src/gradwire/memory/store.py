"""Tensors that outlive a step, kept by parameter name, laid out as kernels want them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.layout import Slot

Tensors = dict[str, dict[str, Tensor]]
"""Field name, then parameter name, to tensor."""


class Store:
    """Named tensors as views of larger allocations.

    When parameters are bucketed anew, the same names are asked for in another layout; the store then moves their
    values there, so what is remembered of a parameter never depends on its bucket.

    Args:
        device: Where the tensors live.

    Attributes:
        layouts: Counts how often tensors were laid out or loaded.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.layouts = 0
        self._views: Tensors = {}
        self._buffers: Tensors = {}
        self._given: set[str] = set()
        self._scratch = torch.empty(0, dtype=torch.float32, device=device)

    def flat(
        self,
        field: str,
        slots: Sequence[Slot],
        numel: int,
        given: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """A buffer of ``numel`` elements that keeps every slot's values under ``field``; zeros at first.

        Args:
            field: What to keep the values as.
            slots: Where each parameter's values lie in the buffer.
            numel: Elements of the buffer.
            given: Whether the values come from outside between steps and are cleared when a step reads them, so that
                they are no part of what a step leaves behind.
            dtype: Of the buffer.
        """
        buffer = torch.zeros(numel, dtype=dtype, device=self.device)
        if given:
            self._given.add(field)
        for slot in slots:
            self._keep(field, slot.name, buffer[slot.offset : slot.stop].view(slot.shape), buffer)
        self.layouts += 1
        return buffer

    def scratch(self, numel: int) -> Tensor:
        """A float32 buffer that shares its memory with every other one: who writes to it may not let others run."""
        storage = self._scratch.untyped_storage()
        if storage.nbytes() < 4 * numel:
            storage.resize_(4 * numel)
        buffer: Tensor = torch.empty(0, dtype=torch.float32, device=self.device).set_(storage, 0, (numel,), (1,))
        return buffer

    def stacked(self, field: str, names: Sequence[str], first: Callable[[str], Tensor]) -> Tensor:
        """Tensors of one shape stacked along a new first dimension, ``first(name)`` for those not yet kept."""
        stack = torch.stack([first(name) for name in names]).to(self.device)
        for name, view in zip(names, stack, strict=True):
            self._keep(field, name, view, stack)
        self.layouts += 1
        return stack

    def get(self, field: str, name: str) -> Tensor | None:
        """What is kept of one parameter, if anything."""
        return self._views.get(field, {}).get(name)

    def put(self, field: str, name: str, value: Tensor) -> None:
        """Keeps a tensor of one parameter in place of what was kept."""
        self._views.setdefault(field, {})[name] = value
        self._buffers.get(field, {}).pop(name, None)

    def drop(self, field: str, name: str) -> None:
        """Keeps nothing of one parameter any more."""
        del self._views[field][name]
        self._buffers.get(field, {}).pop(name, None)

    def buffers(self) -> list[Tensor]:
        """The allocations that :meth:`flat` and :meth:`stacked` made and that are still in use, but what is given."""
        kept = [
            buffer
            for field, buffers in self._buffers.items()
            if field not in self._given
            for buffer in buffers.values()
        ]
        return list({id(buffer): buffer for buffer in kept}.values())

    def singles(self) -> dict[tuple[str, str], Tensor]:
        """What lies in no such allocation because it was :meth:`put` or loaded, by field and parameter name."""
        return {
            (field, name): value
            for field, views in self._views.items()
            if field not in self._given
            for name, value in views.items()
            if name not in self._buffers.get(field, {})
        }

    def state(self) -> Tensors:
        """A copy of everything kept, on the CPU."""
        return {
            field: {name: view.detach().to("cpu", copy=True) for name, view in views.items()}
            for field, views in self._views.items()
        }

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replaces everything kept; tensors asked for later start from what is loaded.

        Raises:
            ConfigurationError: If a tensor's shape is not that of the tensor kept now; nothing is changed.
        """
        for field, views in state.items():
            for name, value in views.items():
                kept = self._views.get(field, {}).get(name)
                if kept is not None and kept.shape != value.shape:
                    raise ConfigurationError(
                        f"the state's {field} of {name!r} has shape {tuple(value.shape)}, this model's has "
                        f"{tuple(kept.shape)}; load a state saved from the same model, method and world size"
                    )
        for field, views in self._views.items():
            for name, view in views.items():
                if name not in state.get(field, {}):
                    view.zero_()
        for field, values in state.items():
            for name, value in values.items():
                kept = self._views.setdefault(field, {}).get(name)
                if kept is None:
                    self._views[field][name] = value.detach().to(self.device, copy=True)
                else:
                    kept.copy_(value)
        self.layouts += 1

    def _keep(self, field: str, name: str, view: Tensor, buffer: Tensor) -> None:
        views = self._views.setdefault(field, {})
        if (former := views.get(name)) is not None:
            if former.shape != view.shape:
                raise ConfigurationError(
                    f"the kept {field} of {name!r} has shape {tuple(former.shape)}, the model now asks for "
                    f"{tuple(view.shape)}; load a state saved from the same model, method and world size"
                )
            view.copy_(former)
        views[name] = view
        self._buffers.setdefault(field, {})[name] = buffer
