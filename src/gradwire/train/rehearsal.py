"""A method's first steps, before training: its kernels are compiled in them, or loaded from the cache on disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from gradwire.layout import flat_slots
from gradwire.methods import Method, name_of
from gradwire.train.configuration import Configuration
from gradwire.train.policy import DensePolicy
from gradwire.train.together import Together

PATIENCE = 3.0
"""Seconds until it is said what takes so long."""

_SHAPES = (("matrix", (72, 48)), ("filter", (8, 4, 3, 3)), ("vector", (70,)))
_STEPS = 3
_rehearsed: set[tuple[type[Method], frozenset[tuple[str, str]]]] = set()
_log = logging.getLogger("gradwire")


def rehearse(configuration: Configuration, *, aloud: bool = False) -> None:
    """Runs a method on the CPU for some steps.

    What was rehearsed once in a process stays so: the same choices again return at once.

    Args:
        configuration: All choices.
        aloud: Whether to log a warning that says what is done if it takes longer than ``PATIENCE``.
    """
    choices = type(configuration.method), frozenset(configuration.describe().items())
    if choices in _rehearsed:
        return
    everything = replace(configuration, dense=DensePolicy(below=0, vectors=False))
    slots = flat_slots(_SHAPES)
    noise = torch.Generator().manual_seed(0)
    with _explained(name_of(configuration.method)) if aloud else nullcontext():
        world = Together(everything, slots, workers=2)
        for _ in range(_STEPS):
            world.average([torch.randn(slots[-1].stop, generator=noise) for _ in range(2)])
    _rehearsed.add(choices)


@contextmanager
def _explained(method: str) -> Iterator[None]:
    text = (
        "still preparing the kernels of %s: the first start on a machine compiles them, which takes up to half a "
        "minute; later ones load them from the disk"
    )
    note = threading.Timer(PATIENCE, _log.warning, [text, method])
    note.daemon = True
    note.start()
    try:
        yield
    finally:
        note.cancel()
