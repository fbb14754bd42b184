"""DDP lays a gradient out as its parameter is, column by column or channels last; methods take it row by row.

So averages, memories, owners and saved states are the same whatever the layout of a parameter in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.memory import Store


def gradients(buffer: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views of a bucket's gradients, with their parameters' shapes.

    DDP gives a gradient the strides of its parameter, or lays it row by row where the parameter has gaps in memory.
    """
    parts = torch.split(buffer, [each.numel() for each in parameters])
    return [
        part.as_strided(each.shape, each.stride()) if _permuted(each) else part.view(each.shape)
        for part, each in zip(parts, parameters, strict=True)
    ]


def permuted(buffer: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Those views that do not go row by row."""
    if not any(map(_permuted, parameters)):
        return []
    return [view for view in gradients(buffer, parameters) if not view.is_contiguous()]


def check_order(buffer: Tensor, named: Sequence[tuple[str, Tensor]]) -> None:
    """Compares a bucket that DDP has just filled with the gradients it is filled from.

    DDP keeps the strides that parameters had when it formed its buckets, and does not say which they were.

    Raises:
        ConfigurationError: If a gradient lies there in another order than its parameter has now.
    """
    parameters = [parameter for _, parameter in named]
    for (name, parameter), view in zip(named, gradients(buffer, parameters), strict=True):
        gradient = parameter.grad
        if gradient is None or parameter.dim() < 2 or view.dtype != gradient.dtype or _same_bits(view, gradient):
            continue
        if any(_same_bits(other, gradient) for other in _other_orders(view)):
            raise ConfigurationError(
                f"the memory format of parameter {name!r} was changed after DDP had formed its buckets; convert the "
                "model first, then wrap it and attach anew"
            )


def _other_orders(view: Tensor) -> list[Tensor]:
    """The same memory row by row, column by column, and with channels last."""
    memory = _memory(view)
    orders = [memory.view(view.shape), memory.view(view.shape[::-1]).permute(*reversed(range(view.dim())))]
    if view.dim() > 2:
        orders.append(memory.view(view.shape[0], *view.shape[2:], view.shape[1]).movedim(-1, 1))
    return orders


def _same_bits(view: Tensor, gradient: Tensor) -> bool:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[view.itemsize]
    return torch.equal(view.view(whole), gradient.view(whole))


def by_rows(views: Sequence[Tensor], store: Store) -> None:
    """Moves each view's elements within its memory, so that they lie there row by row."""
    for view in views:
        rows = store.scratch(view.numel())
        rows.view(view.shape).copy_(view)
        _memory(view).copy_(rows)


def by_strides(views: Sequence[Tensor], store: Store) -> None:
    """Moves elements that lie row by row to where each view has them."""
    for view in views:
        rows = store.scratch(view.numel()).copy_(_memory(view))
        view.copy_(rows.view(view.shape))


def _permuted(parameter: Tensor) -> bool:
    return not parameter.is_contiguous() and bool(torch.ops.aten.is_non_overlapping_and_dense(parameter))


def _memory(view: Tensor) -> Tensor:
    return view.as_strided((view.numel(),), (1,))
