"""Published methods, one file each, and the catalogue that holds them."""

from gradwire.methods.acpsgd import ACPSGD
from gradwire.methods.adacomp import AdaComp
from gradwire.methods.adaptive import Adaptive
from gradwire.methods.dryden import Dryden
from gradwire.methods.efsignsgd import EFSignSGD
from gradwire.methods.floats import BF16, FP16, Dense
from gradwire.methods.hybrid import Hybrid
from gradwire.methods.method import CodecMethod, LayerMethod, LayerState, LinearMethod, Method, Site
from gradwire.methods.powersgd import PowerSGD
from gradwire.methods.qsgd import QSGD
from gradwire.methods.randomk import RandomK
from gradwire.methods.registry import get, make, name_of, names, register
from gradwire.methods.sidco import SIDCo
from gradwire.methods.strom import Strom
from gradwire.methods.threshold import Threshold
from gradwire.methods.topk import TopK
from gradwire.methods.variance import Variance

__all__ = [
    "ACPSGD",
    "BF16",
    "FP16",
    "QSGD",
    "AdaComp",
    "Adaptive",
    "CodecMethod",
    "Dense",
    "Dryden",
    "EFSignSGD",
    "Hybrid",
    "LayerMethod",
    "LayerState",
    "LinearMethod",
    "Method",
    "PowerSGD",
    "RandomK",
    "SIDCo",
    "Site",
    "Strom",
    "Threshold",
    "TopK",
    "Variance",
    "get",
    "make",
    "name_of",
    "names",
    "register",
]
