"""Gradients that every framework is given alike, and what torch's own way in makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import gradwire
from golden import noting
from gradwire.layout import as_matrix

SHAPES = {
    "conv/kernel": (3, 3, 8, 16),
    "conv/bias": (16,),
    "dense/kernel": (67, 40),
    "attention/kernel": (40, 4, 10),
    "odd/gamma": (1031,),
    "scale": (),
    "one": (1,),
}
ALL = range(len(SHAPES))


def gradients(rank: int, step: int) -> list[np.ndarray[Any, Any]]:
    """One of each shape."""
    noise = np.random.default_rng(1000 * rank + step)
    return [np.array(noise.normal(size=shape), np.float32) for shape in SHAPES.values()]


def by_torch(
    sync: gradwire.Synchronizer, names: list[str], rank: int, step: int, order: Sequence[int] = ALL
) -> list[np.ndarray[Any, Any]]:
    """Averages as :class:`gradwire.Synchronizer` makes them of the same gradients as matrices."""
    arrays = gradients(rank, step)
    given = {name: arrays[place] for name, place in zip(names, order, strict=True)}
    averages = sync.average(
        {name: torch.from_numpy(each).reshape(as_matrix(each.shape)) for name, each in given.items()}
    )
    return [averages[name].numpy().reshape(each.shape).copy() for name, each in given.items()]


def torch_synchronizer(
    names: list[str], method: str, order: Sequence[int] = ALL, **options: Any
) -> gradwire.Synchronizer:
    """Torch's own way in, for the same arrays in some order."""
    shapes = [as_matrix(list(SHAPES.values())[place]) for place in order]
    parameters = [(name, torch.nn.Parameter(torch.zeros(each))) for name, each in zip(names, shapes, strict=True)]
    return gradwire.Synchronizer(parameters, method, **options)


def assert_measured(handle: gradwire.Handle) -> None:
    """Where it was given no method it takes what torch's own way in takes for the same arrays."""
    shapes = handle.averaged.shapes.items()
    sync = gradwire.Synchronizer([(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in shapes])
    sync.close()
    handle.close()
    assert str(handle.configuration) == str(sync.configuration)


@contextmanager
def asked() -> Iterator[list[tuple[str, str, bytes]]]:
    """What this rank asks of the wire within: each request's kind, and its payload's dtype and bytes."""
    told: list[tuple[str, str, bytes]] = []
    with noting() as of_ranks:
        yield told
    for kind, payload in of_ranks[dist.get_rank()]:
        told.append((kind, str(payload.dtype), payload.flatten().view(torch.uint8).numpy().tobytes()))


def remembered(handle: gradwire.Handle) -> dict[tuple[str, str], bytes]:
    """All that a handle keeps, as bytes."""
    tensors = handle.state_dict()["tensors"]
    return {
        (field, name): value.contiguous().view(-1).numpy().tobytes()
        for field, each in tensors.items()
        for name, value in each.items()
    }
