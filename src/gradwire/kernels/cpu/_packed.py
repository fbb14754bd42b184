"""Codes of a few bits, packed into bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.kernels.code import NINE, TRITS
from gradwire.kernels.cpu._compiled import Float32Array, UInt8Array, compiled
from gradwire.kernels.cpu._instructions import add_either, negative_byte, put_either, sign_words
from gradwire.kernels.cpu.trits import put_trits


@compiled
def pack(codes: UInt8Array, count: int, bits: int, packed: UInt8Array) -> None:
    """Packs ``count`` codes of a byte each; the size of ``codes`` is a multiple of 8."""
    stop = (count + 7) // 8 * 8
    codes[count:stop] = 0
    if bits == 8:
        for i in range(stop):
            packed[i] = codes[i]
    elif bits == 4:
        pairs = codes[:stop].view(np.uint16)
        for i in range(pairs.size):
            packed[i] = np.uint8(pairs[i] | pairs[i] >> 4)
    else:
        quads = codes[:stop].view(np.uint32)
        for i in range(quads.size):
            packed[i] = np.uint8(quads[i] | quads[i] >> 6 | quads[i] >> 12 | quads[i] >> 18)


@compiled
def unpack(packed: UInt8Array, bits: int, codes: UInt8Array) -> None:
    """Inverse of ``pack``, for all of ``packed``."""
    if bits == 8:
        for i in range(packed.size):
            codes[i] = packed[i]
    elif bits == 4:
        pairs = codes.view(np.uint16)
        for i in range(packed.size):
            pair = np.uint16(packed[i])
            pairs[i] = np.uint16((pair | pair << 4) & 0x0F0F)
    else:
        quads = codes.view(np.uint32)
        for i in range(packed.size):
            quad = np.uint32(packed[i])
            quads[i] = np.uint32((quad | quad << 6 | quad << 12 | quad << 18) & 0x03030303)


@compiled
def pack_signs(t: Float32Array, count: int, packed: UInt8Array) -> None:
    """Packs the first ``count`` values of ``t``, of which the size is a multiple of 8."""
    stop = -(-count // 8) * 8
    t[count:stop] = 0
    for byte in range(stop // 8):
        packed[byte] = negative_byte(t, byte * 8)


@compiled
def put_bits(packed: UInt8Array, if_clear: np.float32, if_set: np.float32, total: Float32Array) -> None:
    """``total`` = what the bits choose; up to 7 values behind it are written, too."""
    for byte in range((total.size + 7) // 8):
        put_either(total, 8 * byte, packed[byte], if_set, if_clear)


@compiled
def add_bits(packed: UInt8Array, if_clear: np.float32, if_set: np.float32, total: Float32Array) -> None:
    """Adds what the bits choose; up to 7 values behind ``total`` are written, too."""
    for byte in range((total.size + 7) // 8):
        add_either(total, 8 * byte, packed[byte], if_set, if_clear)


def write_bits(
    code: Any, bits: int, position: int, count: int, body: UInt8Array, codes: UInt8Array, t: Float32Array
) -> None:
    """Packs codes of 2, 4 or 8 bits."""
    pack(codes, count, bits, body[position * bits // 8 :])


def write_signs(
    code: Any, bits: int, position: int, count: int, body: UInt8Array, codes: UInt8Array, t: Float32Array
) -> None:
    """Packs the signs of ``t``."""
    pack_signs(t, count, body[position // 8 :])


def write_bytes_and_signs(
    code: Any, bits: int, position: int, count: int, body: UInt8Array, codes: UInt8Array, t: Float32Array
) -> None:
    """Packs codes of 8 bits, and the signs of ``t`` if there are ninth ones."""
    pack(codes, count, 8, body[position:])
    if bits == NINE:
        pack_signs(t, count, body[body.size // NINE * 8 + position // 8 :])


def write_trits(
    code: Any, bits: int, position: int, count: int, body: UInt8Array, codes: UInt8Array, t: Float32Array
) -> None:
    """Adds digits of base 3 to bytes of zeros."""
    put_trits(body, position, codes[:count])


def write_trits_or_bits(
    code: Any, bits: int, position: int, count: int, body: UInt8Array, codes: UInt8Array, t: Float32Array
) -> None:
    """Packs codes of 4 or 8 bits, or digits of base 3."""
    if bits == TRITS:
        put_trits(body, position, codes[:count])
    else:
        pack(codes, count, bits, body[position * bits // 8 :])


def read_bits(
    code: Any, bits: int, position: int, count: int, body: UInt8Array, codes: UInt8Array, parts: Float32Array
) -> None:
    """Unpacks codes, if several are in a byte and are not added up as they are packed."""
    if bits in (2, 4):
        unpack(body[position * bits // 8 : (position + count) * bits // 8], bits, codes)


def read_ninth_bits(
    code: Any, bits: int, position: int, count: int, body: UInt8Array, codes: UInt8Array, parts: Float32Array
) -> None:
    """Makes ninth bits the signs of zeros, in ``parts``."""
    if bits == NINE:
        words, signs = parts.view(np.uint32), body[body.size // NINE * 8 + position // 8 :]
        for byte in range(count // 8):
            sign_words(words, 8 * byte, signs[byte])


def read_nothing(
    code: Any, bits: int, position: int, count: int, body: UInt8Array, codes: UInt8Array, parts: Float32Array
) -> None:
    """For codes that are added up as they are packed."""
