"""Codes of a few bits, packed into bytes."""

from __future__ import annotations

import numpy as np

from gradwire.kernels.cpu._compiled import UInt8Array, compiled


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
