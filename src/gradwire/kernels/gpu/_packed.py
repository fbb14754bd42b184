"""Codes of a few bits in bytes: several positions a byte, five digits of base 3, or nine bits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pack(body, position, i, code, count, distance, BITS: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr):
    """Writes the codes of a tile, 0 beyond it, up to a whole byte; four at a time if bytes lie in words of four."""
    if BITS == 5:
        # digits of four positions, which lie in four bytes of one word
        first = 4 * tl.arange(0, WIDTH // 4)
        number, byte = _row_and_byte(position + first, distance)
        group = _side_by_side(code, i, 8, 4, WIDTH) * _power_of_3(number)
        tl.atomic_add((body + byte).to(tl.pointer_type(tl.int32)), group, mask=first < count, sem="relaxed")
    else:
        SIZE: tl.constexpr = 8 if BITS == 9 else BITS
        EACH: tl.constexpr = 4 if UNIT == 4 and BITS >= 4 else 8 // SIZE
        unit = tl.arange(0, WIDTH // EACH)
        units = _side_by_side(code & ((1 << SIZE) - 1), i, SIZE, EACH, WIDTH)
        at = body + position * SIZE // 8 + unit * (EACH * SIZE // 8)
        covered = unit * EACH < (count + 7) // 8 * 8
        if EACH * SIZE == 32:
            tl.store(at.to(tl.pointer_type(tl.int32)), units, mask=covered)
        elif EACH * SIZE == 16:
            tl.store(at.to(tl.pointer_type(tl.int16)), units.to(tl.int16), mask=covered)
        else:
            tl.store(at, units.to(tl.uint8), mask=covered)
        if BITS == 9:
            pack(body + distance, position, i, code >> 8, count, distance, 1, UNIT, WIDTH)


@triton.jit
def _side_by_side(code, i, SIZE: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr):
    """As many codes of so many bits in a number each."""
    return tl.sum(tl.reshape(code << (SIZE * (i % EACH)), (WIDTH // EACH, EACH)), axis=1)


def codes_a_unit(bits: int, unit: int) -> int:
    """How many codes are read from so many bytes: each digit of base 3 takes a byte, of which it leaves the others."""
    return 8 * unit // bits if bits in (1, 2, 4) else unit


@triton.jit
def units_of(
    body, position, count, distance, BITS: tl.constexpr, UNIT: tl.constexpr, EACH: tl.constexpr, COUNT: tl.constexpr
):
    """Where the units of a tile are, which there are, and what :func:`codes_of` needs of each besides."""
    unit = tl.arange(0, COUNT)
    mask = unit * EACH < count
    if BITS == 5:
        number, place = _row_and_byte(position + unit * EACH, distance)
        return body + place, mask, _fraction_of_power_of_3(number)
    elif BITS >= 8:
        return body + position + unit * UNIT, mask, body + distance + position // 8 + unit * EACH // 8
    else:
        return body + position * BITS // 8 + unit * UNIT, mask, unit


@triton.jit
def load_units(at, mask, UNIT: tl.constexpr):
    """Bytes, or words of four."""
    if UNIT == 4:
        at = at.to(tl.pointer_type(tl.int32))
    return tl.load(at, mask=mask, other=0).to(tl.int32)


@triton.jit
def code_of(units, besides, k: tl.constexpr, BITS: tl.constexpr):
    """A code of each unit."""
    if BITS == 5:
        fraction = ((units >> (8 * k)) & 255) * besides
        return tl.umulhi(fraction.to(tl.uint32, bitcast=True), tl.full(units.shape, 3, tl.uint32)).to(tl.int32)
    elif BITS == 9:
        return (units >> (8 * k)) & 255 | ((besides >> k) & 1) << 8
    else:
        return (units >> (BITS * k)) & ((1 << BITS) - 1)


@triton.jit
def joined(parts, EACH: tl.constexpr):
    """A block of the values of units, of which each part has one a unit."""
    if EACH == 1:
        return parts[0]
    else:
        pairs = ()
        for k in tl.static_range(EACH // 2):
            pairs += (tl.join(parts[k], parts[k + EACH // 2]),)  # type: ignore[assignment]
        return joined(pairs, EACH // 2)


@triton.jit
def _row_and_byte(position, distance):
    """Which digit of which byte a position is; comparing is cheaper than dividing."""
    far = tl.full((), 0, tl.int64) + distance
    row = (position >= far).to(tl.int32) + (position >= 2 * far).to(tl.int32)
    row += (position >= 3 * far).to(tl.int32) + (position >= 4 * far).to(tl.int32)
    return row, position - row * far


@triton.jit
def _power_of_3(number):
    """``3**number`` for a digit of a byte."""
    low = tl.where(number == 0, 1, tl.where(number == 1, 3, 9))
    return tl.where(number < 3, low, tl.where(number == 3, 27, 81))


@triton.jit
def _fraction_of_power_of_3(number):
    """``2**32 / 3**(number + 1)``, rounded up: times a byte, modulo ``2**32``, it begins with the digit in base 3."""
    low = tl.where(number == 0, 1431655766, tl.where(number == 1, 477218589, 159072863))
    return tl.where(number < 3, low, tl.where(number == 3, 53024288, 17674763))
