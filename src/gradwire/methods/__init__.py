"""Published methods, one file each, and the catalogue that holds them."""

from gradwire.methods.acpsgd import ACPSGD
from gradwire.methods.efsignsgd import EFSignSGD
from gradwire.methods.floats import BF16, FP16, Dense
from gradwire.methods.globalqsgd import GlobalQSGD
from gradwire.methods.gtopk import GTopK
from gradwire.methods.loco import LoCo
from gradwire.methods.method import CodecMethod, LayerMethod, LayerState, LinearMethod, Method, Site
from gradwire.methods.oktopk import OkTopk
from gradwire.methods.powersgd import PowerSGD
from gradwire.methods.qgz import QgZ
from gradwire.methods.qsgd import QSGD
from gradwire.methods.randomk import RandomK
from gradwire.methods.registry import get, make, name_of, names, register
from gradwire.methods.scalecom import ScaleCom
from gradwire.methods.topk import TopK

__all__ = [
    "ACPSGD",
    "BF16",
    "FP16",
    "QSGD",
    "CodecMethod",
    "Dense",
    "EFSignSGD",
    "GTopK",
    "GlobalQSGD",
    "LayerMethod",
    "LayerState",
    "LinearMethod",
    "LoCo",
    "Method",
    "OkTopk",
    "PowerSGD",
    "QgZ",
    "RandomK",
    "ScaleCom",
    "Site",
    "TopK",
    "get",
    "make",
    "name_of",
    "names",
    "register",
]
