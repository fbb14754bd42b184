"""Published methods, one file each, and the catalogue that holds them."""

from gradwire.methods.acpsgd import ACPSGD
from gradwire.methods.dgc import DGC
from gradwire.methods.ef21 import EF21
from gradwire.methods.efsignsgd import EFSignSGD
from gradwire.methods.floats import BF16, FP16, Dense
from gradwire.methods.inceptionn import INCEPTIONN
from gradwire.methods.method import CodecMethod, LayerMethod, LayerState, LinearMethod, Method, Site
from gradwire.methods.powersgd import PowerSGD
from gradwire.methods.qsgd import QSGD
from gradwire.methods.randomk import RandomK
from gradwire.methods.registry import get, make, name_of, names, register
from gradwire.methods.sketchml import SketchML
from gradwire.methods.topk import TopK

__all__ = [
    "ACPSGD",
    "BF16",
    "DGC",
    "EF21",
    "FP16",
    "INCEPTIONN",
    "QSGD",
    "CodecMethod",
    "Dense",
    "EFSignSGD",
    "LayerMethod",
    "LayerState",
    "LinearMethod",
    "Method",
    "PowerSGD",
    "RandomK",
    "Site",
    "SketchML",
    "TopK",
    "get",
    "make",
    "name_of",
    "names",
    "register",
]
