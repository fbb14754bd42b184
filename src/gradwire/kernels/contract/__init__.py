"""What a device must offer, a file for each stage of a gradient's path that needs kernels."""

from __future__ import annotations

from typing import Protocol

from gradwire.kernels.contract.index import Index
from gradwire.kernels.contract.integer import Integer
from gradwire.kernels.contract.lowrank import LowRank
from gradwire.kernels.contract.memory import Memory
from gradwire.kernels.contract.quantize import Quantize
from gradwire.kernels.contract.rotation import Rotation
from gradwire.kernels.contract.select import Select
from gradwire.kernels.contract.sketch import Sketch
from gradwire.kernels.contract.sparse import Sparse
from gradwire.kernels.contract.trits import Trits
from gradwire.kernels.contract.wire import Wire


class Kernels(Index, Integer, LowRank, Memory, Quantize, Rotation, Select, Sketch, Sparse, Trits, Wire, Protocol):
    """All of it. Tensors are contiguous; values float32, payloads uint8, positions int64."""
