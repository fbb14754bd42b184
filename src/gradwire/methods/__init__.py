"""Published methods, one file each, and the catalogue that holds them."""

from gradwire.methods.acpsgd import ACPSGD
from gradwire.methods.atomo import Atomo
from gradwire.methods.demo import DeMo
from gradwire.methods.efsignsgd import EFSignSGD
from gradwire.methods.floats import BF16, FP16, Dense
from gradwire.methods.gradiveq import GradiVeQ
from gradwire.methods.method import CodecMethod, LayerMethod, LayerState, LinearMethod, Method, Site
from gradwire.methods.powersgd import PowerSGD
from gradwire.methods.qsgd import QSGD
from gradwire.methods.randomk import RandomK
from gradwire.methods.registry import get, make, name_of, names, register
from gradwire.methods.sketchedsgd import SketchedSGD
from gradwire.methods.thc import THC
from gradwire.methods.topk import TopK

__all__ = [
    "ACPSGD",
    "BF16",
    "FP16",
    "QSGD",
    "THC",
    "Atomo",
    "CodecMethod",
    "DeMo",
    "Dense",
    "EFSignSGD",
    "GradiVeQ",
    "LayerMethod",
    "LayerState",
    "LinearMethod",
    "Method",
    "PowerSGD",
    "RandomK",
    "Site",
    "SketchedSGD",
    "TopK",
    "get",
    "make",
    "name_of",
    "names",
    "register",
]
