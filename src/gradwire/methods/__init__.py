"""Published methods, one file each, and the catalogue that holds them."""

from gradwire.methods.acpsgd import ACPSGD
from gradwire.methods.adacomp import AdaComp
from gradwire.methods.adaptive import Adaptive
from gradwire.methods.alq import ALQ, AMQ
from gradwire.methods.atomo import Atomo
from gradwire.methods.blocksgdm import BlockSGDM
from gradwire.methods.deadzone import DeadZone, Dithered, Subspace
from gradwire.methods.demo import DeMo
from gradwire.methods.dgc import DGC
from gradwire.methods.dion import Dion
from gradwire.methods.dryden import Dryden
from gradwire.methods.eden import EDEN
from gradwire.methods.ef21 import EF21
from gradwire.methods.ef21sgdm import EF21SGDM
from gradwire.methods.efsignsgd import EFSignSGD
from gradwire.methods.eightbit import EightBit
from gradwire.methods.floats import BF16, FP16, Dense
from gradwire.methods.gaussiank import GaussianK
from gradwire.methods.globalqsgd import GlobalQSGD
from gradwire.methods.gradiveq import GradiVeQ
from gradwire.methods.greedylore import GreedyLore
from gradwire.methods.gspar import GSpar
from gradwire.methods.gtopk import GTopK
from gradwire.methods.hybrid import Hybrid
from gradwire.methods.inceptionn import INCEPTIONN
from gradwire.methods.intsgd import IntSGD
from gradwire.methods.layer import LayerMethod, LayerState
from gradwire.methods.lion import Lion, LionCub
from gradwire.methods.loco import LoCo
from gradwire.methods.method import CodecMethod, Context, LinearMethod, Method
from gradwire.methods.natural import Natural
from gradwire.methods.nuqsgd import NUQSGD
from gradwire.methods.oktopk import OkTopk
from gradwire.methods.onebit import OneBit
from gradwire.methods.powersgd import PowerSGD
from gradwire.methods.published import Published
from gradwire.methods.qgz import QgZ
from gradwire.methods.qsgd import QSGD
from gradwire.methods.randomk import RandomK
from gradwire.methods.registry import as_published, get, make, name_of, names, parse, register
from gradwire.methods.sbc import SBC
from gradwire.methods.scalecom import ScaleCom
from gradwire.methods.sdp4bit import SDP4Bit
from gradwire.methods.sidco import SIDCo
from gradwire.methods.signsgd import SignSGD, Signum
from gradwire.methods.sketchedsgd import SketchedSGD
from gradwire.methods.sketchml import SketchML
from gradwire.methods.strom import Strom
from gradwire.methods.terngrad import TernGrad
from gradwire.methods.thc import THC
from gradwire.methods.threelc import ThreeLC
from gradwire.methods.threshold import Threshold
from gradwire.methods.topk import TopK
from gradwire.methods.variance import Variance

__all__ = [
    "ACPSGD",
    "ALQ",
    "AMQ",
    "BF16",
    "DGC",
    "EDEN",
    "EF21",
    "EF21SGDM",
    "FP16",
    "INCEPTIONN",
    "NUQSGD",
    "QSGD",
    "SBC",
    "THC",
    "AdaComp",
    "Adaptive",
    "Atomo",
    "BlockSGDM",
    "CodecMethod",
    "Context",
    "DeMo",
    "DeadZone",
    "Dense",
    "Dion",
    "Dithered",
    "Dryden",
    "EFSignSGD",
    "EightBit",
    "GSpar",
    "GTopK",
    "GaussianK",
    "GlobalQSGD",
    "GradiVeQ",
    "GreedyLore",
    "Hybrid",
    "IntSGD",
    "LayerMethod",
    "LayerState",
    "LinearMethod",
    "Lion",
    "LionCub",
    "LoCo",
    "Method",
    "Natural",
    "OkTopk",
    "OneBit",
    "PowerSGD",
    "Published",
    "QgZ",
    "RandomK",
    "SDP4Bit",
    "SIDCo",
    "ScaleCom",
    "SignSGD",
    "Signum",
    "SketchML",
    "SketchedSGD",
    "Strom",
    "Subspace",
    "TernGrad",
    "ThreeLC",
    "Threshold",
    "TopK",
    "Variance",
    "as_published",
    "get",
    "make",
    "name_of",
    "names",
    "parse",
    "register",
]
