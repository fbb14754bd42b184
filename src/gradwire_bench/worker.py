"""What the worker processes of every benchmark share: the process group, lines to the parent, agreement, errors."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from gradwire import lab, own

Made = TypeVar("Made")


@contextlib.contextmanager
def process_group(timeout: float, backend: str = "gloo") -> Iterator[tuple[int, int]]:
    """Joins the group that the environment describes, with one compute thread; yields rank and world size.

    Args:
        timeout: Seconds after which a collective that some rank does not join fails.
        backend: As torch is told.
    """
    torch.set_num_threads(1)
    own.load()
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def emit(event: str, **fields: Any) -> None:
    """Tells the parent something: one JSON object on a line of standard output."""
    print(json.dumps({"event": event, **fields}), flush=True)


def agree(seconds: float = 0.0, *, failed: bool = False) -> tuple[float, bool]:
    """The largest time over all ranks, and whether any rank failed: the same answer on every rank."""
    seen = torch.tensor([seconds, float(failed)], dtype=torch.float64)
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    slowest, any_failed = seen.tolist()
    return slowest, any_failed > 0


def attempted(number: int, work: Callable[[], Made]) -> Made | None:
    """What some work makes; None if it failed on any rank, which the parent is told of the row with that number."""
    made, error = None, None
    try:
        made = work()
    except Exception as caught:  # whatever stops a row belongs in it
        error = caught
        emit("failed", row=number, reason=reason(caught))
    return None if agree(failed=error is not None)[1] else made


def mean_over_ranks(value: float) -> float:
    """The mean of a number over all ranks."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def interface_sent_bytes() -> int:
    """Bytes that this worker's interface has sent so far, headers included."""
    return lab.interface_counters().tx_bytes


def fingerprint(net: nn.Module) -> str:
    """Of all parameters' bits."""
    digest = hashlib.blake2b(digest_size=8)
    for parameter in net.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def reason(error: BaseException) -> str:
    """An error as one line for a table."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
