"""How values are written."""

from gradwire.codecs.quantize.cast import Cast
from gradwire.codecs.quantize.deadzone import DeadZone, Dithered
from gradwire.codecs.quantize.inceptionn import Inceptionn
from gradwire.codecs.quantize.names import BUCKET, names, parse, register
from gradwire.codecs.quantize.quantile import Quantile
from gradwire.codecs.quantize.quantiser import Quantiser
from gradwire.codecs.quantize.subspace import SubspaceDeadZone
from gradwire.codecs.quantize.zero_runs import ZeroRuns

__all__ = [
    "BUCKET",
    "Cast",
    "DeadZone",
    "Dithered",
    "Inceptionn",
    "Quantile",
    "Quantiser",
    "SubspaceDeadZone",
    "ZeroRuns",
    "names",
    "parse",
    "register",
]
