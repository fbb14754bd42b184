"""How values are written."""

from gradwire.quantize.cast import Cast
from gradwire.quantize.sign import Sign
from gradwire.quantize.stochastic import Stochastic

__all__ = ["Cast", "Sign", "Stochastic"]
