"""Codes of a few bits in bytes: several positions a byte, five digits of base 3, or nine bits."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pack(body, position, i, code, count, distance, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Writes the codes of a tile, 0 beyond it, up to a whole byte."""
    if BITS == 5:
        # digits of four positions, which lie in four bytes of one word
        number, _ = _row_and_byte(position + i, distance)
        group = tl.sum(tl.reshape((code * _power_of_3(number)) << (8 * (i % 4)), (WIDTH // 4, 4)), axis=1)
        first = 4 * tl.arange(0, WIDTH // 4)
        _, byte = _row_and_byte(position + first, distance)
        tl.atomic_add((body + byte).to(tl.pointer_type(tl.int32)), group, mask=first < count, sem="relaxed")
    elif BITS >= 8:
        covered = i < (count + 7) // 8 * 8
        tl.store(body + position + i, (code & 255).to(tl.uint8), mask=covered)
        if BITS == 9:
            pack(body + distance, position, i, code >> 8, count, distance, 1, WIDTH)
    else:
        EACH: tl.constexpr = 8 // BITS
        byte = tl.arange(0, WIDTH // EACH)
        packed = tl.sum(tl.reshape(code << (BITS * (i % EACH)), (WIDTH // EACH, EACH)), axis=1)
        tl.store(body + position // EACH + byte, packed.to(tl.uint8), mask=byte * EACH < (count + 7) // 8 * 8)


@triton.jit
def unpack(body, position, count, distance, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """The codes of a tile."""
    i = tl.arange(0, WIDTH)
    if BITS == 5:
        number, place = _row_and_byte(position + i, distance)
        packed = tl.load(body + place, mask=i < count, other=0).to(tl.int32)
        quotient = (packed * _reciprocal_of_power_of_3(number)) >> 16
        return quotient - ((quotient * 21846) >> 16) * 3
    elif BITS >= 8:
        code = tl.load(body + position + i, mask=i < count, other=0).to(tl.int32)
        if BITS == 9:
            code = code | unpack(body + distance, position, count, distance, 1, WIDTH) << 8
        return code
    else:
        EACH: tl.constexpr = 8 // BITS
        byte = tl.arange(0, WIDTH // EACH)
        packed = tl.load(body + position // EACH + byte, mask=byte * EACH < count, other=0).to(tl.int32)
        codes = (packed[:, None] >> (BITS * tl.arange(0, EACH))[None, :]) & ((1 << BITS) - 1)
        return tl.reshape(codes, (WIDTH,))


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
def _reciprocal_of_power_of_3(number):
    """``65536 / 3**number``, rounded up."""
    low = tl.where(number == 0, 65536, tl.where(number == 1, 21846, 7282))
    return tl.where(number < 3, low, tl.where(number == 3, 2428, 810))
