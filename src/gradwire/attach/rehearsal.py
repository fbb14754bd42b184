"""A method's first steps, before training: its kernels are compiled in them, or loaded from the cache on disk.

They run in a small world of two workers, so that the kernels that the method needs, and no others, are compiled.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from gradwire.engine.configuration import Configuration
from gradwire.engine.mixture import Configured
from gradwire.errors import ConfigurationError, GradwireError
from gradwire.kernels import parts, shortcoming
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld
from gradwire.methods import Method, name_of
from gradwire.policy import DensePolicy
from gradwire.surroundings import as_on_the_wire

PATIENCE = 3.0
"""Seconds until it is said what takes so long."""

CPU = torch.device("cpu")
_SHAPES = (("matrix", (72, 48)), ("filter", (8, 4, 3, 3)), ("vector", (70,)))
_STEPS = 3
_rehearsed: set[tuple[str, type[Method], frozenset[tuple[str, str]]]] = set()
_log = logging.getLogger("gradwire")


def rehearse_all(configured: Configured, device: torch.device, *, aloud: bool = False) -> None:
    """Rehearses all that is to average, at any time, where a device has kernels; says so where it has none.

    Args:
        configured: All choices.
        device: Where the gradients live.
        aloud: As in :func:`rehearse`, and whether to log what the device lacks.
    """
    if lack := shortcoming(device):
        if aloud:
            _log.warning("%s", lack)
        return
    for stage in configured.stages:
        for rule in stage.rules:
            rehearse(rule, device, aloud=aloud)


@as_on_the_wire()
def rehearse(configuration: Configuration, device: torch.device = CPU, *, aloud: bool = False) -> None:
    """Runs a method for some steps, so that its kernels are compiled, each by one process of a machine.

    What was rehearsed once in a process stays so: the same choices again return at once. On a GPU, kernels are compiled
    for each kind of layout, and most of them later: what is found out is that they can be.

    Args:
        configuration: All choices.
        device: Where the gradients live.
        aloud: Whether to log a warning that says what is done if it takes longer than ``PATIENCE``.

    Raises:
        ConfigurationError: If nothing can be compiled, or be kept on the disk.
    """
    configuration = replace(configuration, start=0, inside=None)
    choices = device.type, type(configuration.method), frozenset(configuration.describe().items())
    if choices in _rehearsed:
        return
    with _explained(name_of(configuration.method)) if aloud else nullcontext():
        try:
            _run(configuration, device)
        except GradwireError:
            raise
        except OSError as error:
            raise ConfigurationError(
                f"compiled kernels cannot be kept on the disk: {error}; make room there, or set NUMBA_CACHE_DIR to "
                "a folder that has some"
            ) from error
        except Exception as error:
            shapes = ", ".join(str(shape) for _, shape in _SHAPES)
            error.add_note(f"while gradwire rehearsed the method on noise of shapes {shapes}, those it accepts()")
            raise
        _rehearsed.add(choices)


def _run(configuration: Configuration, device: torch.device) -> None:
    everything = replace(configuration, dense=DensePolicy(below=0, vectors=configuration.dense.vectors))
    slots = flat_slots(_SHAPES)
    noise = torch.Generator().manual_seed(0)
    world = LocalWorld(everything, slots, 2, device)
    for step in range(_STEPS):
        averages = [torch.randn(slots[-1].stop, generator=noise, dtype=torch.float32).to(device) for _ in range(2)]
        with parts.small() if step % 2 else nullcontext():
            world.average(averages)
        if not torch.equal(*(each.view(torch.int32) for each in averages)):
            raise ConfigurationError(
                f"{configuration} left other averages on rank 1 than on rank 0 in a rehearsal on noise; compute the "
                "same bits on every rank, of answers and of randomness that all share"
            )


@contextmanager
def _explained(method: str) -> Iterator[None]:
    text = (
        "still preparing the kernels of %s: the first start on a machine compiles each in one process, which takes "
        "up to half a minute for all, while others wait; later ones load them from the disk"
    )
    note = threading.Timer(PATIENCE, _log.warning, [text, method])
    note.daemon = True
    note.start()
    try:
        yield
    finally:
        note.cancel()
