"""Levels at powers of two, drawn so that the mean is right."""

from __future__ import annotations

import math

import numpy as np

from gradwire.kernels.cpu._compiled import Float32Array, float_of
from gradwire.kernels.cpu._source import total
from gradwire.kernels.cpu._stages import CODES, Compiled, Scratch, Source, inverse_and_scale
from gradwire.kernels.cpu.qsgd import write_norm
from gradwire.kernels.reference.nuqsgd import NUQSGD


def _measure(code: NUQSGD, source: Source, scale: Float32Array, scratch: Scratch) -> bool:
    return bool(write_norm(math.sqrt(total(source, True, scratch.lanes)), scale))


def _number(code: NUQSGD, t: np.float32, one: np.float32, other: np.float32, random: np.uint32) -> np.int32:
    top, place = np.int32((1 << (code.bits - 1)) - 1), np.int32(code.bits - 1)
    smallest, many = float_of(np.uint32(np.uint32(128 - top) << 23)), float_of(np.uint32(np.uint32(126 + top) << 23))
    x = np.float32(abs(t) * one)
    drawn = np.uint32(random >> np.uint32(9))
    number = min(np.int32(np.uint32(np.float32(x).view(np.uint32) + drawn) >> np.uint32(23)) - np.int32(127) + top, top)
    up = np.float32(np.int32(drawn)) * np.float32(2.0**-23) + np.float32(2.0**-24) < x * many
    return np.int32((np.int32(up) if x < smallest else number) | np.int32(t < 0) << place)


def _value(code: NUQSGD, number: np.int32, one: np.float32, other: np.float32) -> np.float32:
    top, place = np.uint32((1 << (code.bits - 1)) - 1), np.uint32(code.bits - 1)
    level = np.uint32(np.uint32(number) & top)
    power = np.uint32(np.uint32(np.uint32(127) - top + level) << np.uint32(23))
    power = np.uint32(0) if level == np.uint32(0) else power
    sign = np.uint32(np.uint32(np.uint32(number) >> place) << np.uint32(31))
    return np.float32(float_of(np.uint32(power | sign)) * other)


CODES[NUQSGD] = Compiled(_measure, _number, _value, inverse_and_scale)
