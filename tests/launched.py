"""What a launcher such as torchrun tells a worker, for trainers in the pool's processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

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
