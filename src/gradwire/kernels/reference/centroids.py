"""Randomly rotated values as the nearest of a few centroids, each piece at the scale that makes it right on average."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.reference._torch import SMALLEST_SCALE, formed, keep, pack, segment_total, unpack
from gradwire.kernels.reference.rotation import LARGEST, _float, _hadamard, _restored, _signs
from gradwire.layout import Int64Array, UInt64Array
from gradwire.randomness import MASK32, run_keys


def centroids_encode(
    pieces: Int64Array, source: Compensated, centroids: Tensor, keys: UInt64Array, scales: Tensor, codes: Tensor
) -> None:
    """Rotates pieces and writes the nearest centroid of every coordinate, at a scale that keeps all along the piece.

    With ``y`` the rotated piece over its root mean square ``s``, and ``c`` its centroids, the scale is
    ``s * size / sum(c * y)``; of a piece with ``s`` below ``SMALLEST_SCALE`` it is 0, with codes 0.
    """
    boundaries = (centroids[1:] + centroids[:-1]) / 2
    bits = len(boundaries).bit_length()
    chosen = torch.zeros(codes.numel() * 8 // bits, dtype=torch.uint8, device=codes.device)
    for number, (start, length, size, position, counter, run) in enumerate(pieces.tolist()):
        t, kept = formed(source, start, start + length)
        measured = math.sqrt(segment_total([t.double().square()]) / size)
        scales[number] = 0.0 if math.isfinite(measured) else torch.nan
        if not SMALLEST_SCALE <= measured < math.inf:
            keep(kept, t)
            continue
        scale = _float(measured, t)
        signs = _signs(counter, size, int(keys[run]), t.device)
        y = _hadamard(torch.nn.functional.pad(t / scale, (0, size - length)) * signs) * _float(1 / math.sqrt(size), t)
        code = torch.bucketize(y, boundaries)
        c = centroids[code]
        scales[number] = min(float(scale) * size / segment_total([(c * y).double().abs()]), LARGEST)
        chosen[position : position + size] = code.to(torch.uint8)
        keep(kept, t - _restored(c, scales[number], signs, 0.5, 1, 1)[:length])
    codes.copy_(pack(chosen, bits))


def centroids_decode(
    pieces: Int64Array,
    scales: Tensor,
    codes: Tensor,
    centroids: Tensor,
    key: Tensor,
    streams: UInt64Array,
    out: Tensor,
    add: bool,
    weight: float,
) -> None:
    """Writes what one payload's pieces stand for, or adds it to ``out``, and weighs the sum.

    ``key`` is the payload's own, ``int32[1]``: with ``streams`` it makes the keys of runs.
    """
    keys = run_keys(int(key) & MASK32, streams)
    chosen = unpack(codes, (len(centroids) - 1).bit_length()).long()
    for (start, length, size, position, counter, run), scale in zip(pieces.tolist(), scales, strict=True):
        signs = _signs(counter, size, int(keys[run]), out.device)
        value = _restored(centroids[chosen[position : position + size]], scale, signs, 0.5, 1, 1)[:length]
        value = value if scale.isfinite() else torch.full_like(value, torch.nan)
        piece = out[start : start + length]
        piece.copy_((piece + value if add else value) * weight)
