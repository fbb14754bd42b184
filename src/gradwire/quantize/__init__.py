"""How values are written."""

from gradwire.quantize.cast import Cast
from gradwire.quantize.dynamic import Dynamic
from gradwire.quantize.exponent import Exponent
from gradwire.quantize.inceptionn import Inceptionn
from gradwire.quantize.names import parse
from gradwire.quantize.power_of_two import PowerOfTwo
from gradwire.quantize.quantile import Quantile
from gradwire.quantize.sign import Sign
from gradwire.quantize.stochastic import Stochastic
from gradwire.quantize.ternary import Ternary
from gradwire.quantize.three_level import ThreeLevel
from gradwire.quantize.two_means import TwoMeans
from gradwire.quantize.vote import Vote
from gradwire.quantize.zero_runs import ZeroRuns

__all__ = [
    "Cast",
    "Dynamic",
    "Exponent",
    "Inceptionn",
    "PowerOfTwo",
    "Quantile",
    "Sign",
    "Stochastic",
    "Ternary",
    "ThreeLevel",
    "TwoMeans",
    "Vote",
    "ZeroRuns",
    "parse",
]
