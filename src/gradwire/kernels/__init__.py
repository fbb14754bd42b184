"""The inner loops: ``reference`` is the specification in plain torch, ``cpu`` the same bits in Numba.

Both offer the functions of :class:`Kernels`, and mypy holds them to it: a new kernel is a signature in ``contract`` and
a function in each of them, imported by their ``__init__``. Payload formats are documented with the reference.

Every encoder first forms the compensated values ``t`` of its block:

* without a residual, ``t = gradient``;
* with one, ``t = beta * residual + gamma * gradient``, and the encoder leaves ``t - sent`` in ``residual``.

A value ``t[i]`` that is not finite never enters the residual: there the residual stays as it was, the payload of that
segment is marked so that every decoder returns NaN for it, and nothing of the segment counts as sent.
"""

from __future__ import annotations

from functools import cache

import torch

from gradwire.errors import ConfigurationError
from gradwire.kernels.contract import Kernels

__all__ = ["Kernels", "for_device"]


def for_device(device: torch.device) -> Kernels:
    """The kernels for tensors on ``device``: Numba on the CPU, the plain torch reference elsewhere.

    Raises:
        ConfigurationError: If Numba is told to compile nothing.
    """
    return _compiled() if device.type == "cpu" else _reference()


@cache
def _compiled() -> Kernels:
    from numba.core import config

    if config.DISABLE_JIT:  # type: ignore[attr-defined]
        raise ConfigurationError("NUMBA_DISABLE_JIT is set, and the kernels for the CPU must be compiled; unset it")
    from gradwire.kernels import cpu

    return cpu


@cache
def _reference() -> Kernels:
    from gradwire.kernels import reference

    return reference
