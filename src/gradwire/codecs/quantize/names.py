"""Codecs by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gradwire.codecs.codec import Codec
from gradwire.codecs.quantize.quantile import Quantile
from gradwire.codecs.quantize.quantiser import Quantiser
from gradwire.codecs.quantize.zero_runs import ZeroRuns
from gradwire.errors import ConfigurationError
from gradwire.kernels import codes

BUCKET = 512
"""Values that share a scale in QSGD's practice."""

_PLAIN: Mapping[str, Callable[[], Codec]] = {
    "sign": lambda: Quantiser(codes.Sign()),
    "vote": lambda: Quantiser(codes.Vote()),
    "onebit": lambda: Quantiser(codes.OneBit()),
    "dynamic": lambda: Quantiser(codes.Dynamic()),
    "natural": lambda: Quantiser(codes.Natural()),
    "terngrad": lambda: Quantiser(codes.TernGrad()),
    "3lc": ZeroRuns,
    "exponent": lambda: Quantiser(codes.Exponent()),
}

_NUMBERED: Mapping[str, Callable[[int], Codec]] = {
    "natural": lambda bits: Quantiser(codes.Natural(bits)),
    "qsgd": lambda bits: Quantiser(codes.QSGD(bits), BUCKET),
    "nearest": lambda bits: Quantiser(codes.QSGD(bits, nearest=True), BUCKET),
    "quantile": Quantile,
}


KNOWN = ", ".join(map(repr, [*_PLAIN, "natural:9", "qsgd:4", "nearest:4", "quantile:256"]))
"""For messages."""


def find(name: str) -> Codec | None:
    """The codec of that name, if there is one."""
    plain, colon, number = name.partition(":")
    if not colon and plain in _PLAIN:
        return _PLAIN[plain]()
    if plain in _NUMBERED and number.isascii() and number.isdigit():
        return _NUMBERED[plain](int(number))
    return None


def parse(codec: str | Codec) -> Codec:
    """Reads ``sign``, ``vote``, ``onebit``, ``dynamic``, ``natural``, ``terngrad``, ``3lc``, ``exponent``.

    With a number: ``natural:9``, ``qsgd:BITS``, ``nearest:BITS``, ``quantile:BUCKETS``.

    Raises:
        ConfigurationError: If ``codec`` is neither these nor a codec.
    """
    if isinstance(codec, Codec):
        return codec
    found = find(codec) if isinstance(codec, str) else None
    if found is None:
        raise ConfigurationError(f"codec {codec!r} is not known; choose one of {KNOWN}")
    return found
