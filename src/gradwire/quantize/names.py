"""Codecs by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gradwire.codec import Codec
from gradwire.errors import ConfigurationError
from gradwire.quantize.dynamic import Dynamic
from gradwire.quantize.exponent import Exponent
from gradwire.quantize.power_of_two import PowerOfTwo
from gradwire.quantize.quantile import Quantile
from gradwire.quantize.sign import Sign
from gradwire.quantize.stochastic import Stochastic
from gradwire.quantize.ternary import Ternary
from gradwire.quantize.three_level import ThreeLevel
from gradwire.quantize.two_means import TwoMeans
from gradwire.quantize.vote import Vote

_PLAIN: Mapping[str, Callable[[], Codec]] = {
    "sign": Sign,
    "vote": Vote,
    "two-means": TwoMeans,
    "dynamic": Dynamic,
    "natural": PowerOfTwo,
    "terngrad": Ternary,
    "3lc": ThreeLevel,
    "exponent": Exponent,
}

_NUMBERED: Mapping[str, Callable[[int], Codec]] = {
    "natural": PowerOfTwo,
    "qsgd": Stochastic,
    "nearest": lambda bits: Stochastic(bits, rounding="nearest"),
    "quantile": Quantile,
}


KNOWN = ", ".join(map(repr, [*_PLAIN, "natural:8", "qsgd:4", "nearest:4", "quantile:256"]))
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
    """Reads ``sign``, ``vote``, ``two-means``, ``dynamic``, ``natural``, ``terngrad``, ``3lc``, ``exponent``.

    With a number: ``natural:8``, ``qsgd:BITS``, ``nearest:BITS``, ``quantile:BUCKETS``.

    Raises:
        ConfigurationError: If ``codec`` is neither these nor a codec.
    """
    if isinstance(codec, Codec):
        return codec
    found = find(codec) if isinstance(codec, str) else None
    if found is None:
        raise ConfigurationError(f"codec {codec!r} is not known; choose one of {KNOWN}")
    return found
