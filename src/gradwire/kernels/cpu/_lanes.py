"""Sums in the order that the reference defines: in float64 lanes, element ``j`` in lane ``j % LANES``, in registers."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from gradwire.kernels.cpu._compiled import Float32Array, Float64Array, compiled, inlined
from gradwire.kernels.cpu._instructions import Vector, element_pointer, in_all_lanes, intrinsic
from gradwire.kernels.reference._torch import CHUNK, LANES

_SINGLE = ir.VectorType(ir.FloatType(), LANES)
_DOUBLE = ir.VectorType(ir.DoubleType(), LANES)
_FLOAT32_BYTES, _FLOAT64_BYTES = 4, 8


_lanes: Any = Vector(types.float64, LANES)


@intrinsic
def no_lanes(typing_context: Any) -> Any:
    """All of them zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _DOUBLE([0.0] * LANES)

    return _lanes(), generate


@intrinsic
def put_lanes(typing_context: Any, lanes: Any, sums: Any) -> Any:
    """``sums[:LANES] = lanes``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = element_pointer(context, builder, signature.args[1], args[1], ir.IntType(64)(0), _DOUBLE)
        builder.store(args[0], pointer, align=_FLOAT64_BYTES)
        return context.get_dummy_value()

    return types.void(_lanes, sums), generate


@intrinsic
def plus_magnitudes(typing_context: Any, lanes: Any, t: Any, first: Any) -> Any:
    """``lanes + |t[first:first + LANES]|``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        exact = builder.fpext(_row(context, builder, signature, args, 1, args[2]), _DOUBLE)
        return builder.fadd(args[0], _magnitude(builder, exact))

    return _lanes(_lanes, t, types.intp), generate


@intrinsic
def plus_products(typing_context: Any, lanes: Any, t: Any, other: Any, first: Any) -> Any:
    """``lanes + t * other`` of the elements from ``first`` on; each product is exact."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = (_row(context, builder, signature, args, number, args[3]) for number in (1, 2))
        return builder.fadd(args[0], builder.fmul(*(builder.fpext(row, _DOUBLE) for row in rows)))

    return _lanes(_lanes, t, other, types.intp), generate


@intrinsic
def plus_terms(
    typing_context: Any, lanes: Any, gradient: Any, residual: Any, first: Any, beta: Any, gamma: Any, squared: Any
) -> Any:
    """``lanes + |t|``, or ``+ t * t``, with ``t = beta * residual + gamma * gradient`` from ``first`` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = (_row(context, builder, signature, args, number, args[3]) for number in (1, 2))
        weights = (in_all_lanes(builder, args[number], _SINGLE) for number in (5, 4))
        new, kept = (builder.fmul(weight, row) for weight, row in zip(weights, rows, strict=True))
        exact = builder.fpext(builder.fadd(kept, new), _DOUBLE)
        square = builder.fmul(exact, exact)
        return builder.fadd(args[0], builder.select(args[6], square, _magnitude(builder, exact)))

    return _lanes(_lanes, gradient, residual, types.intp, types.float32, types.float32, types.boolean), generate


def _row(context: Any, builder: Any, signature: Any, args: Any, number: int, first: Any) -> Any:
    """``LANES`` elements of one of the arrays given."""
    pointer = element_pointer(context, builder, signature.args[number], args[number], first, _SINGLE)
    return builder.load(pointer, align=_FLOAT32_BYTES)


def _magnitude(builder: Any, vector: Any) -> Any:
    name = f"llvm.fabs.v{LANES}f64"
    function: Any = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_DOUBLE, [_DOUBLE]), name)  # type: ignore[no-untyped-call]
    return builder.call(function, [vector])


@compiled
def sum_of_lanes(lanes: Float64Array) -> float:
    """Adds the upper half of the lanes to the lower half until one is left."""
    width = LANES // 2
    while width:
        for i in range(width):
            lanes[i] += lanes[width + i]
        width //= 2
    return float(lanes[0])


@inlined
def add_chunk(total: float, chunk: int, of_chunk: float, totals: Float64Array) -> float:
    """Adds up a segment's chunk of this number, in lanes of totals; returns the sum of all groups that are complete."""
    number, lane = chunk % CHUNK, chunk % LANES
    totals[lane] = of_chunk if number < LANES else totals[lane] + of_chunk
    return total + float(sum_of_lanes(totals)) if number == CHUNK - 1 else total


@inlined
def add_rest(total: float, chunks: int, totals: Float64Array) -> float:
    """What all of a segment's chunks come to, by what :func:`add_chunk` has left; unused lanes are not looked at."""
    if chunks == 1:
        return float(totals[0])
    used, width = min(chunks % CHUNK, LANES), LANES // 2
    if not used:
        return total
    while width:
        for i in range(used - width):
            totals[i] += totals[width + i]
        used = min(used, width)
        width //= 2
    return float(total + totals[0])


@compiled
def sum_of_magnitudes(t: Float32Array, lanes: Float64Array) -> float:
    """Sum of ``|t|`` over one chunk."""
    whole, sums = t.size // LANES * LANES, no_lanes()
    for row in range(0, whole, LANES):
        sums = plus_magnitudes(sums, t, row)
    put_lanes(sums, lanes)
    for i in range(t.size - whole):
        lanes[i] += np.float64(abs(t[whole + i]))
    return float(sum_of_lanes(lanes))
