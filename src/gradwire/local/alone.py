"""One tensor through one method, on one worker, without a process group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.engine.choices import Choices
from gradwire.engine.configuration import Configuration
from gradwire.errors import ConfigurationError
from gradwire.layout import GRADIENT_DTYPES, flat_slots
from gradwire.local.world import LocalWorld
from gradwire.memory import Memory
from gradwire.methods import Method
from gradwire.plain import plain
from gradwire.policy import DensePolicy
from gradwire.surroundings import as_on_the_wire


@dataclass(frozen=True, eq=False)
class Roundtrip:
    """What came back.

    Attributes:
        decoded: What every worker would decode of this one, with the tensor's shape and dtype.
        wire_bytes: Size of what is written for the wire, all rounds together, in bytes.
    """

    decoded: Tensor
    wire_bytes: int


@as_on_the_wire()
def roundtrip(
    tensor: Tensor,
    method: str | Method,
    *,
    granularity: str | None = None,
    route: str | None = None,
    memory: str | Memory | None = None,
    owner: str | Codec | None = None,
    seed: int = 0,
    step: int = 0,
    **options: Any,
) -> Roundtrip:
    """Compresses and decompresses a tensor as one worker alone would.

    The tensor is compressed whatever its size. On the sharded route it is compressed twice, as in training; the gather
    route, taken here where a method has both, shows one compression.

    Args:
        tensor: float32, float16, bfloat16 or float64 values of any shape; not changed.
        method: A name of ``gradwire.methods.names()`` or a method object.
        granularity: As in :func:`gradwire.compress`.
        route: As in :func:`gradwire.compress`; ``"gather"`` if None and possible.
        memory: As in :func:`gradwire.compress`.
        owner: As in :func:`gradwire.compress`.
        seed: Where all randomness starts.
        step: Which step's randomness to use, from 0.
        **options: The method's hyper-parameters.

    Returns:
        The decoded tensor and its size on the wire.

    Raises:
        ConfigurationError: If anything cannot be as asked.

    Example:
        >>> roundtrip(torch.ones(1024), "efsignsgd").wire_bytes
        132
    """
    choices = replace(Choices.of(locals()), dense=DensePolicy(below=0, vectors=False))
    check_tensor("tensor", tensor)
    step = plain(step)
    if not isinstance(step, int) or step < 0:
        raise ConfigurationError(f"step={step!r} is out of range; choose a whole number of steps, from 0")
    configuration = Configuration.of(method, options, choices)
    if route is None and "gather" in configuration.method.routes:
        configuration = Configuration.of(method, options, replace(choices, route="gather"))
    world = LocalWorld(configuration, flat_slots([("tensor", tuple(tensor.shape))]), workers=1, device=tensor.device)
    world.engines[0].begin(step)
    flat = tensor.detach().to(torch.float32, copy=True).reshape(-1)
    written = world.average([flat]).written_bytes
    return Roundtrip(flat.view(tensor.shape).to(tensor.dtype), written)


def check_tensor(name: str, given: object) -> None:
    """Raises ConfigurationError unless it is a tensor that can be compressed."""
    if not isinstance(given, Tensor) or given.dtype not in GRADIENT_DTYPES:
        kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise ConfigurationError(f"{name} is of {kind}; give float32, float16, bfloat16 or float64 values")
    if given.layout != torch.strided:
        raise ConfigurationError(f"{name} has layout {given.layout}; give a dense one, such as tensor.to_dense()")
