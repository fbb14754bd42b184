"""What a launcher such as torchrun tells a worker, for trainers in the pool's processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def launched() -> Iterator[int]:
    """The rank, with the environment of torchrun, and Accelerate's state as in a new process."""
    from accelerate.state import AcceleratorState, GradientState

    rank, workers = dist.get_rank(), dist.get_world_size()
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, "OMP_NUM_THREADS": 1}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in told.items()})
    if workers == 1:
        os.environ.pop("LOCAL_RANK")
        os.environ.pop("WORLD_SIZE")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    try:
        yield rank
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def warnings_of_gradwire() -> Iterator[list[str]]:
    """What is logged within."""
    lines: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(listener)
    try:
        yield lines
    finally:
        logging.getLogger("gradwire").removeHandler(listener)


def owed(attachment: Any) -> torch.Tensor:
    """What this rank has not sent of the one model that was attached to."""
    (handle,) = attachment.handles
    return torch.cat([each.view(-1) for each in handle.state_dict()["tensors"]["residual"].values()])


def begun(attachment: Any) -> bool:
    """Whether its one handle is as if it had just been attached."""
    (state,) = attachment.state()
    return state["step"] == 0 and not any(each.any() for kept in state["tensors"].values() for each in kept.values())


def scaled_by(attachment: Any, scaler: torch.amp.GradScaler) -> bool:
    """Whether its one handle divides gradients by the scaler's scale."""
    (handle,) = attachment.handles
    return any(getattr(guard, "_scaler", None) is scaler for guard in handle.engine.guards)
