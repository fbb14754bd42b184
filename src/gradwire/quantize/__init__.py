"""How values are written."""

from __future__ import annotations

from gradwire.codec import Codec
from gradwire.errors import ConfigurationError
from gradwire.quantize.cast import Cast
from gradwire.quantize.inceptionn import Inceptionn
from gradwire.quantize.quantile import Quantile
from gradwire.quantize.sign import Sign
from gradwire.quantize.stochastic import Stochastic

__all__ = ["Cast", "Inceptionn", "Quantile", "Sign", "Stochastic", "parse"]


def parse(codec: str | Codec) -> Codec:
    """Reads ``sign`` or ``qsgd:BITS``.

    Raises:
        ConfigurationError: If ``codec`` is neither these nor a codec.
    """
    match codec:
        case Codec():
            return codec
        case "sign":
            return Sign()
        case str() if codec.startswith("qsgd:") and codec[5:].isdigit():
            return Stochastic(bits=int(codec[5:]))
    raise ConfigurationError(f"codec {codec!r} is not known; choose 'sign' or 'qsgd:4', or give a codec")
