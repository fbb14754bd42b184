"""The codes there are; each is documented, and defined in plain torch, with the reference."""

from __future__ import annotations

from gradwire.kernels.reference.ballot import Ballot
from gradwire.kernels.reference.dynamic import Dynamic
from gradwire.kernels.reference.exponent import Exponent
from gradwire.kernels.reference.integer import Integers
from gradwire.kernels.reference.natural import Natural
from gradwire.kernels.reference.nonuniform import NonUniform
from gradwire.kernels.reference.nuqsgd import NUQSGD
from gradwire.kernels.reference.onebit import OneBit
from gradwire.kernels.reference.qsgd import QSGD
from gradwire.kernels.reference.sign import Sign
from gradwire.kernels.reference.terngrad import TernGrad
from gradwire.kernels.reference.threelc import ThreeLC
from gradwire.kernels.reference.vote import Vote

ALL: tuple[type, ...] = (
    Ballot,
    Dynamic,
    Exponent,
    Integers,
    Natural,
    NonUniform,
    NUQSGD,
    OneBit,
    QSGD,
    Sign,
    TernGrad,
    ThreeLC,
    Vote,
)
