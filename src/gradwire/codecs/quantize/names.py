"""Codecs by name."""

from __future__ import annotations

from collections.abc import Callable

from gradwire.codecs.codec import Codec
from gradwire.codecs.quantize.quantile import Quantile
from gradwire.codecs.quantize.quantiser import Quantiser
from gradwire.codecs.quantize.smoothed import Smoothed
from gradwire.codecs.quantize.zero_runs import ZeroRuns
from gradwire.kernels import codes
from gradwire.registry import Registry

BUCKET = 512
"""Values that share a scale in QSGD's practice, for levels that are asked for by name."""

codecs: Registry[Callable[..., Codec]] = Registry("codec", ", or a codec object")
register, names = codecs.register, codecs.names

register("sign")(lambda: Quantiser(codes.Sign()))
register("vote")(lambda: Quantiser(codes.Vote()))
register("onebit")(lambda: Quantiser(codes.OneBit()))
register("dynamic")(lambda: Quantiser(codes.Dynamic()))
register("natural")(lambda: Quantiser(codes.Natural()))
register("terngrad")(lambda: Quantiser(codes.TernGrad()))
register("3lc")(ZeroRuns)
register("exponent")(lambda: Quantiser(codes.Exponent()))
register("natural:N")(lambda bits: Quantiser(codes.Natural(bits)))
register("qsgd:N")(lambda bits: Quantiser(codes.QSGD(bits), BUCKET))
register("nearest:N")(lambda bits: Quantiser(codes.QSGD(bits, nearest=True), BUCKET))
register("smoothed:N")(lambda bits: Smoothed(codes.QSGD(bits), BUCKET))
register("quantile:N")(Quantile)


def parse(codec: str | Codec) -> Codec:
    """A codec by its name, such as ``"sign"`` or ``"qsgd:4"``, or itself.

    Raises:
        ConfigurationError: If ``codec`` is neither a name of :func:`names` nor a codec.
    """
    return codec if isinstance(codec, Codec) else codecs.make(codec)
