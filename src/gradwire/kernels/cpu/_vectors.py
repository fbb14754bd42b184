"""A vector of float32 values as a type of compiled functions, for loops that the compiler does not vectorise."""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

from gradwire.kernels.cpu._compiled import INFINITE, MAGNITUDE
from gradwire.kernels.cpu._instructions import Vector, element_pointer, in_all_lanes, intrinsic

WIDTH = 16 if binding.get_host_cpu_features().get("avx512f") else 8
"""Values of a vector."""

_VECTOR = ir.VectorType(ir.FloatType(), WIDTH)
_ELEMENT_BYTES = 4
_REORDERING = ("reassoc", "nsz")


_vector: Any = Vector(types.float32, WIDTH)


@intrinsic
def splat(typing_context: Any, value: Any) -> Any:
    """``value`` in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return in_all_lanes(builder, args[0], _VECTOR)

    return _vector(types.float32), generate


@intrinsic
def load(typing_context: Any, values: Any, index: Any) -> Any:
    """``values[index:index + WIDTH]`` of a contiguous array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1], _VECTOR)
        return builder.load(pointer, align=_ELEMENT_BYTES)

    return _vector(values, types.intp), generate


@intrinsic
def store(typing_context: Any, values: Any, index: Any, vector: Any) -> Any:
    """``values[index:index + WIDTH] = vector`` in a contiguous array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1], _VECTOR)
        builder.store(args[2], pointer, align=_ELEMENT_BYTES)
        return context.get_dummy_value()

    return types.void(values, types.intp, _vector), generate


@intrinsic
def multiply_add(typing_context: Any, factor: Any, other: Any, term: Any) -> Any:
    """``factor * other + term``, rounded once, of vectors or of single values."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = args[0].type
        name = f"llvm.fma.v{WIDTH}f32" if kind == _VECTOR else "llvm.fma.f32"
        fused: Any = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)  # type: ignore[no-untyped-call]
        return builder.call(fused, args)

    return factor(factor, factor, factor), generate


@intrinsic
def where_finite(typing_context: Any, vector: Any, other: Any) -> Any:
    """The lanes of ``vector`` that are finite, and those of ``other`` elsewhere."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        integers = ir.VectorType(ir.IntType(32), WIDTH)
        magnitudes = builder.and_(builder.bitcast(args[0], integers), integers([int(MAGNITUDE)] * WIDTH))
        finite = builder.icmp_unsigned("<", magnitudes, integers([int(INFINITE)] * WIDTH))
        return builder.select(finite, args[0], args[1])

    return _vector(_vector, _vector), generate


@intrinsic
def sum_of_vector(typing_context: Any, vector: Any) -> Any:
    """The sum of all lanes, in any order."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector, width = args[0], WIDTH
        while width > 1:
            width //= 2
            halves = [
                ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(first, first + width)))
                for first in (0, width)
            ]
            low, high = (builder.shuffle_vector(vector, vector, half) for half in halves)
            vector = builder.fadd(low, high, flags=_REORDERING)
        return builder.extract_element(vector, ir.IntType(32)(0))

    return types.float32(_vector), generate
