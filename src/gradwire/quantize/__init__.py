"""How values are written."""

from gradwire.quantize.cast import Cast
from gradwire.quantize.inceptionn import Inceptionn
from gradwire.quantize.names import BUCKET, parse
from gradwire.quantize.quantile import Quantile
from gradwire.quantize.quantiser import Quantiser
from gradwire.quantize.zero_runs import ZeroRuns

__all__ = ["BUCKET", "Cast", "Inceptionn", "Quantile", "Quantiser", "ZeroRuns", "parse"]
