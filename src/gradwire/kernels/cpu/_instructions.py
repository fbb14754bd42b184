"""Machine instructions that loops do not become: eight or 32 lanes at a time, and words at any byte."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending
from numba.core import cgutils, types
from numba.core.datamodel import models

from gradwire.kernels.cpu._compiled import MAGNITUDE
from gradwire.kernels.reference._torch import LANES

intrinsic: Any = extending.intrinsic
"""A function for compiled callers that is written in LLVM's language, for what loops do not vectorise to."""


_BYTE_LANES = 8
_ELEMENT_BYTES = 4
_LINE = 16
"""Float32 values that the cache takes at once."""


class Vector(types.Type):
    """So many numbers as one value of compiled functions, in as many registers as they take.

    Args:
        kind: Of numbers.
        count: How many.
    """

    def __init__(self, kind: types.Float, count: int) -> None:
        super().__init__(name=f"{kind}x{count}")
        self.kind, self.count = kind, count


@extending.register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        number = manager.lookup(numba_type.kind).get_value_type()
        super().__init__(manager, numba_type, ir.VectorType(number, numba_type.count))  # type: ignore[no-untyped-call]


def element_pointer(context: Any, builder: Any, array_type: Any, value: Any, index: Any, vector: ir.VectorType) -> Any:
    """Points to consecutive elements of an array as one vector."""
    data = context.make_array(array_type)(context, builder, value).data
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def in_all_lanes(builder: Any, value: Any, vector: ir.VectorType) -> Any:
    """A vector with ``value`` in all lanes."""
    undefined = ir.Constant(vector, ir.Undefined)
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(builder.insert_element(undefined, value, ir.IntType(32)(0)), undefined, lanes)


@intrinsic
def negative_byte(typing_context: Any, values: Any, index: Any) -> Any:
    """Bit ``i`` is set where ``values[index + i] < 0``, for eight float32 values."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), _BYTE_LANES)
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1], vector)
        loaded = builder.load(pointer, align=_ELEMENT_BYTES)
        return builder.bitcast(builder.fcmp_ordered("<", loaded, vector([0.0] * _BYTE_LANES)), ir.IntType(_BYTE_LANES))

    return types.uint8(values, types.intp), generate


@intrinsic
def put_either(typing_context: Any, total: Any, index: Any, byte: Any, if_set: Any, if_clear: Any) -> Any:
    """``total[index + i] = if_set if bit i of the byte is set else if_clear``, for eight float32 values."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, chosen = _place_and_choice(context, builder, signature, args)
        builder.store(chosen, pointer, align=_ELEMENT_BYTES)
        return context.get_dummy_value()

    return types.void(total, types.intp, types.uint8, types.float32, types.float32), generate


@intrinsic
def add_either(typing_context: Any, total: Any, index: Any, byte: Any, if_set: Any, if_clear: Any) -> Any:
    """``total[index + i] += if_set if bit i of the byte is set else if_clear``, for eight float32 values."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, chosen = _place_and_choice(context, builder, signature, args)
        builder.store(builder.fadd(builder.load(pointer, align=_ELEMENT_BYTES), chosen), pointer, align=_ELEMENT_BYTES)
        return context.get_dummy_value()

    return types.void(total, types.intp, types.uint8, types.float32, types.float32), generate


@intrinsic
def sign_words(typing_context: Any, words: Any, index: Any, byte: Any) -> Any:
    """``words[index + i] = 0x80000000 if bit i of the byte is set else 0``, for eight uint32 values."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words, index, byte = args
        vector = ir.VectorType(ir.IntType(32), _BYTE_LANES)
        pointer = element_pointer(context, builder, signature.args[0], words, index, vector)
        mask = builder.bitcast(byte, ir.VectorType(ir.IntType(1), _BYTE_LANES))
        signs = builder.and_(builder.sext(mask, vector), vector([1 << 31] * _BYTE_LANES))
        builder.store(signs, pointer, align=_ELEMENT_BYTES)
        return context.get_dummy_value()

    return types.void(words, types.intp, types.uint8), generate


def _place_and_choice(context: Any, builder: Any, signature: Any, args: Any) -> tuple[Any, Any]:
    """Where eight values lie, and for each bit of the byte one of two values."""
    total, index, byte, if_set, if_clear = args
    vector = ir.VectorType(ir.FloatType(), _BYTE_LANES)
    mask = builder.bitcast(byte, ir.VectorType(ir.IntType(1), _BYTE_LANES))
    chosen = builder.select(mask, in_all_lanes(builder, if_set, vector), in_all_lanes(builder, if_clear, vector))
    return element_pointer(context, builder, signature.args[0], total, index, vector), chosen


@intrinsic
def reaching_mask(typing_context: Any, values: Any, index: Any, threshold: Any) -> Any:
    """Bit ``i`` is set where the magnitude bits of ``values[index + i]`` reach the threshold, for 32 float32 values."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values, index, threshold = args
        vector = ir.VectorType(ir.IntType(32), LANES)
        pointer = element_pointer(context, builder, signature.args[0], values, index, vector)
        loaded = builder.load(pointer, align=_ELEMENT_BYTES)
        magnitudes = builder.and_(loaded, vector([int(MAGNITUDE)] * LANES))
        reaching = builder.icmp_signed(">=", magnitudes, in_all_lanes(builder, threshold, vector))
        return builder.bitcast(reaching, ir.IntType(LANES))

    return types.uint32(values, types.intp, types.uint32), generate


@intrinsic
def fetch(typing_context: Any, values: Any, index: Any) -> Any:
    """Has 32 float32 values brought to the cache from ``values[index]`` on, and waits for none; there may be none."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address, number, number, number])
        function: Any = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")  # type: ignore[no-untyped-call]
        for line in range(0, LANES, _LINE):
            place = builder.gep(data, [builder.add(args[1], ir.IntType(64)(line))])
            read, near, of_data = number(0), number(3), number(1)
            builder.call(function, [builder.bitcast(place, address), read, near, of_data])
        return context.get_dummy_value()

    return types.void(values, types.intp), generate


@intrinsic
def trailing_zeros(typing_context: Any, word: Any) -> Any:
    """Number of the lowest bit that is set in a uint32 other than 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.cttz(args[0], ir.IntType(1)(1)), ir.IntType(64))

    return types.int64(types.uint32), generate


def _loading(kind: Any) -> Any:
    """Reads a number of ``kind`` from the bytes from an index on, the first one lowest."""

    @intrinsic
    def load(typing_context: Any, octets: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = element_pointer(context, builder, signature.args[0], args[0], args[1], ir.IntType(kind.bitwidth))
            return builder.load(pointer, align=1)

        return kind(octets, types.intp), generate

    return load


def _storing(kind: Any) -> Any:
    """Writes a number of ``kind`` to the bytes from an index on, the lowest one first."""

    @intrinsic
    def store(typing_context: Any, octets: Any, index: Any, word: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            octets, index, word = args
            pointer = element_pointer(context, builder, signature.args[0], octets, index, ir.IntType(kind.bitwidth))
            builder.store(word, pointer, align=1)
            return context.get_dummy_value()

        return types.void(octets, types.intp, kind), generate

    return store


load_word, load64 = map(_loading, (types.uint32, types.uint64))
store_word, store64 = map(_storing, (types.uint32, types.uint64))
