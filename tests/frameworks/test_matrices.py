"""What low-rank methods make of kernels whose channels come last."""

from __future__ import annotations

import numpy as np
import torch

import gradwire
from gradwire.attach.array_synchronizer import ArraySynchronizer
from gradwire.attach.elsewhere import Cell
from gradwire.cost import shapes
from pool import ranks


def channels_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A kernel of torch's as other frameworks have it: ``(height, width, in, out)``, and ``(in, out)``."""
    return (*shape[2:], *shape[:2][::-1])


@ranks(2)
def test_powersgd_compresses_resnet50_with_channels_last() -> None:
    arrays = {name: channels_last(shape) for name, shape in shapes.get("resnet50").parameters}
    assert arrays["conv1.weight"] == (7, 7, 3, 64)
    values = {name: torch.from_numpy(np.ones(shape, "float32")) for name, shape in arrays.items()}

    def cells() -> list[Cell]:
        return [Cell(name, shape, "float32", np.ndarray, print) for name, shape in arrays.items()]

    sync = ArraySynchronizer(cells, "powersgd", None, {"rank": 4})
    sync.average_arrays([torch.zeros(numel) for numel in sync.numels], values, values)
    assert 64 < sync.stats().dense_bytes / sync.stats().wire_bytes < 68
    sync.close()

    parameters = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in arrays.items()]
    by_rows = gradwire.Synchronizer(parameters, "powersgd", rank=4)
    by_rows.average(values)
    assert 1 < by_rows.stats().dense_bytes / by_rows.stats().wire_bytes < 1.2
    by_rows.close()
