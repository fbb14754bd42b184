"""What the compiled kernels share: how they are compiled, defined sums, hashes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.core import config, types
from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.kernels.cpu._disk import keep
from gradwire.layout import Float32Array as Float32Array
from gradwire.layout import Float64Array as Float64Array
from gradwire.randomness import FIRST_FACTOR, SECOND_FACTOR

INLINED: Any = {
    "error_model": "numpy",
    "forceinline": True,
    "_nrt": False,
    "no_cfunc_wrapper": True,
    "no_cpython_wrapper": True,
}
"""Options of what its callers are to contain."""


def compiled(function: Callable[..., Any]) -> Any:
    """Compiles a function for one signature, on first use; without fastmath, so that bits are those of the reference.

    It can make no arrays, and counts no references to those it is given: that would cost more than a small segment.

    Raises:
        ConfigurationError: If what is compiled can be kept nowhere, or Numba is told to compile nothing.
    """
    return _compiled(function, {**INLINED, "forceinline": False, "no_cpython_wrapper": False})


def inlined(function: Callable[..., Any]) -> Any:
    """As :func:`compiled`, for what is called so often that its callers are to contain it."""
    return _compiled(function, INLINED)


def written_out(function: Callable[..., Any]) -> Any:
    """As :func:`inlined`, for what returns arrays: its callers are compiled as if it stood there.

    So whether references to arrays are counted is for them to say.
    """
    return _compiled(function, {"inline": "always"})


def summing(function: Callable[..., Any]) -> Any:
    """As :func:`inlined`, for sums that are the same in any order, because they are exact."""
    return _compiled(function, {**INLINED, "fastmath": {"reassoc"}})


def allocating(function: Callable[..., Any]) -> Any:
    """As :func:`compiled`, for what makes arrays."""
    return _compiled(function, {**INLINED, "forceinline": False, "_nrt": True, "no_cpython_wrapper": False})


def reordering(function: Callable[..., Any]) -> Any:
    """Compiles a function whose sums may be reordered and whose products may be fused with them."""
    return _compiled(function, {"error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}})


def _compiled(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    if config.DISABLE_JIT:  # type: ignore[attr-defined]
        raise ConfigurationError("NUMBA_DISABLE_JIT is set, and the kernels for the CPU must be compiled; unset it")
    try:
        return counting(keep(numba.njit(nogil=True, cache=True, **options)(function)))
    except RuntimeError as error:
        raise ConfigurationError(
            f"compiled kernels can be kept neither beside {function.__code__.co_filename} nor in this user's cache: no "
            "folder can be written; set NUMBA_CACHE_DIR to one that can"
        ) from error


def counting(dispatcher: Any) -> Any:
    """Has its compiled callers take it for all integers where they give it a 0; Numba makes one more for each constant.

    The 0 is what a counter is before Numba sees that it counts; of other constants, and of flags, functions are faster.
    """
    template = dispatcher.get_call_template

    def counted(kind: Any) -> Any:
        return types.unliteral(kind) if kind == types.literal(0) else kind  # type: ignore[no-untyped-call]

    dispatcher.get_call_template = lambda args, kws: template([*map(counted, args)], kws)
    return dispatcher


UInt8Array = np.ndarray[Any, np.dtype[np.uint8]]
UInt32Array = np.ndarray[Any, np.dtype[np.uint32]]

MAGNITUDE = np.uint32(0x7FFFFFFF)
"""The bits of a float32 but its sign: ordered as magnitudes are."""

PIECE = 1024
"""Elements that are worked on together, in the nearest cache, where the order of sums does not matter."""

INFINITE = np.uint32(0x7F800000)
"""Magnitude bits of infinity; NaNs have larger ones."""


def array(values: Tensor) -> Any:
    """The NumPy view of a CPU tensor, sharing memory."""
    return (values.detach() if values.requires_grad else values).numpy()


def rows_of_bytes(payloads: Tensor) -> tuple[UInt8Array, int]:
    """The memory of strided payload rows as one contiguous array, and the distance of rows in bytes."""
    rows, size = payloads.shape
    stride = payloads.stride(0) if rows > 1 else size
    return array(payloads.as_strided(((rows - 1) * stride + size,), (1,))), stride


@written_out
def copy(values: Any, out: Any) -> None:
    """Copies one array to another as long, of any kind; ``out[:] = values`` takes three seconds more to compile.

    They are spent on the text of an error.
    """
    for i in range(values.size):
        out[i] = values[i]


@compiled
def largest_magnitude(t: Float32Array) -> np.uint32:
    """Bits of the largest magnitude; at least ``INFINITE`` if any value is not finite."""
    bits = t.view(np.uint32)
    largest = np.uint32(0)
    for i in range(bits.size):
        largest = max(largest, np.uint32(bits[i] & MAGNITUDE))
    return largest


@compiled
def keep_finite(t: Float32Array, residual: Float32Array) -> None:
    """``residual = t`` where ``t`` is finite."""
    for i in range(t.size):
        if abs(t[i]) < np.float32(np.inf):
            residual[i] = t[i]


@compiled
def mix64(value: np.uint64) -> np.uint64:
    """See :func:`gradwire.randomness.mix64`."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@compiled
def hash32(low_key: np.uint32, high_key: np.uint32, counter: np.uint32) -> np.uint32:
    """See :func:`gradwire.randomness.hash32`."""
    bits = np.uint32(counter ^ low_key)
    bits = np.uint32(np.uint32(bits ^ (bits >> np.uint32(16))) * np.uint32(FIRST_FACTOR))
    bits = np.uint32(np.uint32(bits ^ (bits >> np.uint32(15)) ^ high_key) * np.uint32(SECOND_FACTOR))
    return np.uint32(bits ^ (bits >> np.uint32(15)))


@inlined
def halves(key: np.uint64) -> tuple[np.uint32, np.uint32]:
    """The low and the high half of a key."""
    return np.uint32(key & np.uint64(0xFFFFFFFF)), np.uint32(key >> np.uint64(32))


@inlined
def float_of(bits: np.uint32) -> np.float32:
    """The float32 of these bits."""
    return np.uint32(bits).view(np.float32)
