"""How values are written."""

from gradwire.quantize.cast import Cast
from gradwire.quantize.sign import Sign
from gradwire.quantize.stochastic import Stochastic
from gradwire.quantize.two_means import TwoMeans
from gradwire.quantize.vote import Vote

__all__ = ["Cast", "Sign", "Stochastic", "TwoMeans", "Vote"]
