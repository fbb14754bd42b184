"""Optimizers that compress momenta, of every kind, and what tests do with any."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.optim import CompressedAdam, OneBitAdam, OneBitLamb, ZeroOneAdam

KINDS: dict[str, tuple[type[CompressedAdam], dict[str, Any]]] = {
    "one bit": (OneBitAdam, {"freeze_step": 4}),
    "zero one": (ZeroOneAdam, {"freeze_step": 4, "kappa": 2, "double_every": 3, "max_interval": 4}),
    "lamb": (OneBitLamb, {"freeze_step": 4}),
}
MEASURED_EVERY_STEP: dict[str, dict[str, int]] = {"one bit": {}, "zero one": {"kappa": 100}, "lamb": {}}
MET = {
    "one bit": [True] * 16,
    "lamb": [True] * 16,
    # synchronised in every step up to 7, then every second, from step 10 on every fourth
    "zero one": [True] * 7 + [False, True, False, False, False, True, False, False, False],
}


def made(kind: str, params: Any, **options: Any) -> CompressedAdam:
    maker, own = KINDS[kind]
    named = params.named_parameters() if isinstance(params, nn.Module) else params
    return maker(named, **{"lr": 0.01, **own, **options})


def meet(optimizer: CompressedAdam) -> None:
    """Makes parameters the same on all ranks where they may differ."""
    if isinstance(optimizer, ZeroOneAdam):
        optimizer.synchronize()


def bytes_of(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def same(ours: Any, theirs: Any) -> bool:
    """Whether two states are equal to the last bit."""
    if isinstance(ours, Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)
