"""Tensors that outlive a step, kept by parameter name, laid out as kernels want them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

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
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._views: Tensors = {}

    def flat(self, field: str, slots: Sequence[Slot], numel: int) -> Tensor:
        """A float32 buffer of ``numel`` elements that keeps every slot's values under ``field``; zeros at first."""
        buffer = torch.zeros(numel, dtype=torch.float32, device=self.device)
        for slot in slots:
            self._keep(field, slot.name, buffer[slot.offset : slot.stop].view(slot.shape))
        return buffer

    def stacked(self, field: str, names: Sequence[str], first: Callable[[str], Tensor]) -> Tensor:
        """Tensors of one shape stacked along a new first dimension, ``first(name)`` for those not yet kept."""
        stack = torch.stack([first(name) for name in names]).to(self.device)
        for name, view in zip(names, stack, strict=True):
            self._keep(field, name, view)
        return stack

    def get(self, field: str, name: str) -> Tensor | None:
        """What is kept of one parameter, if anything."""
        return self._views.get(field, {}).get(name)

    def put(self, field: str, name: str, value: Tensor) -> None:
        """Keeps a tensor of one parameter in place of what was kept."""
        self._views.setdefault(field, {})[name] = value

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

    def held(self, names: Collection[str]) -> Callable[[], None]:
        """Copies what is kept of some parameters; calling what it returns brings that back."""
        views = [
            (field, name, view, view.clone())
            for field, kept in self._views.items()
            for name, view in kept.items()
            if name in names
        ]

        def bring_back() -> None:
            for kept in self._views.values():
                for name in [each for each in kept if each in names]:
                    del kept[name]
            for field, name, view, values in views:
                view.copy_(values)
                self._views[field][name] = view

        return bring_back

    def _keep(self, field: str, name: str, view: Tensor) -> None:
        views = self._views.setdefault(field, {})
        if (former := views.get(name)) is not None:
            if former.shape != view.shape:
                raise ConfigurationError(
                    f"the kept {field} of {name!r} has shape {tuple(former.shape)}, the model now asks for "
                    f"{tuple(view.shape)}; load a state saved from the same model, method and world size"
                )
            view.copy_(former)
        views[name] = view
