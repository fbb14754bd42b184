"""Rates, times and other numbers as they are written: ``10gbit``, ``50us``, ``96230``."""

from __future__ import annotations

import math
import re

from gradwire.errors import ConfigurationError

_NUMBER = r"(\d+(?:\.\d+)?)\s*"
_RATE = re.compile(_NUMBER + "(bit|kbit|mbit|gbit|tbit)", re.IGNORECASE | re.ASCII)
_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_LOOSE = re.compile(_NUMBER + r"([kmgt]?)i?(bits?|b|bytes?)?(/s|ps|/sec)?", re.IGNORECASE | re.ASCII)
_TIME = re.compile(_NUMBER + "(ns|us|µs|ms|s)", re.ASCII)
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}

SLOWEST, FASTEST = 1e5, 1e14


def rate(text: str, name: str = "link", slowest: float = SLOWEST, fastest: float = FASTEST) -> float:
    """Bits a second of a number and one of bit, kbit, mbit, gbit, tbit; decimal, and letter case does not matter.

    Raises:
        ConfigurationError: If the text is no rate, with what was probably meant, or none that a network has.
    """
    match = _RATE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ConfigurationError(
            f"{name}={text!r} is not a rate: {_meant(str(text))}write a number and one of bit, kbit, mbit or gbit, "
            "such as 10gbit"
        )
    found = float(match[1]) * _RATES[match[2].lower()]
    if not slowest <= found <= fastest:
        raise ConfigurationError(
            f"{name}={text!r} is {found:g} bits a second; give {written(slowest)} to {written(fastest)}"
        )
    return found


def _meant(text: str) -> str:
    """What was probably meant, as a question with a space behind it."""
    loose = _LOOSE.fullmatch(text.strip())
    if loose is None or not float(loose[1]):
        return ""
    number, prefix, unit = float(loose[1]), loose[2].lower(), loose[3] or ""
    bits = f"{loose[1]}{prefix or 'g'}bit"
    if unit == "B" or unit.lower().startswith("byte"):
        return f"a byte is 8 bits: did you mean {8 * number:g}{prefix}bit? "
    if unit in ("b", ""):
        return f"did you mean {bits} (or {8 * number:g}{prefix or 'g'}bit, if these are bytes)? "
    return f"did you mean {bits}? "


def seconds(text: str, name: str = "latency") -> float:
    """Seconds of a number and one of ns, us, ms, s.

    Raises:
        ConfigurationError: If the text is no time.
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzµ /")
        hint = f"did you mean {number}us or {number}ms? " if re.fullmatch(_NUMBER, number) else ""
        raise ConfigurationError(f"{name}={text!r} is not a time: {hint}write a number and one of us, ms or s, as 50us")
    found = float(match[1]) * _TIMES[match[2]]
    if found > 10:
        raise ConfigurationError(f"{name}={text!r} is {found:g} s; give at most 10 s")
    return found


def rounded(value: float, figures: int) -> str:
    """A number to so many significant figures; an exponent is for small ones only."""
    return f"{float(f'{value:.{figures}g}'):.15g}"


def written(bits: float) -> str:
    """A rate as :func:`rate` reads it."""
    unit, factor = next((u, f) for u, f in reversed(_RATES.items()) if bits >= f or u == "bit")
    return f"{bits / factor:g}{unit}" if math.isfinite(bits) else "none"
