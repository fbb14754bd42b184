"""gradwire: data-parallel training, cheap on the wire.

>>> model = DistributedDataParallel(net)
>>> handle = gradwire.compress(model, "acpsgd", rank=4)

Names are loaded when they are first used, so that what needs no torch, such as the lab, does not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire import lab, memory, methods, optim
    from gradwire.analysis import Analysis, analyze
    from gradwire.codec import FORMAT_VERSION
    from gradwire.errors import ConfigurationError, DivergenceError, GradwireError, LabError, PayloadError, WireError
    from gradwire.train import (
        Audit,
        DensePolicy,
        Deviation,
        Handle,
        PerRank,
        Roundtrip,
        SecondMoments,
        Stats,
        Synchronizer,
        compress,
        redistribute,
        roundtrip,
    )
    from gradwire.train.periodic import Periodic, periodic

__version__ = "0.1.0"

_HOMES = {
    "FORMAT_VERSION": "gradwire.codec",
    "Analysis": "gradwire.analysis",
    "Audit": "gradwire.train",
    "ConfigurationError": "gradwire.errors",
    "DensePolicy": "gradwire.train",
    "Deviation": "gradwire.train",
    "DivergenceError": "gradwire.errors",
    "GradwireError": "gradwire.errors",
    "Handle": "gradwire.train",
    "LabError": "gradwire.errors",
    "PayloadError": "gradwire.errors",
    "PerRank": "gradwire.train",
    "Periodic": "gradwire.train.periodic",
    "Roundtrip": "gradwire.train",
    "SecondMoments": "gradwire.train",
    "Stats": "gradwire.train",
    "Synchronizer": "gradwire.train",
    "WireError": "gradwire.errors",
    "analyze": "gradwire.analysis",
    "compress": "gradwire.train",
    "redistribute": "gradwire.train",
    "periodic": "gradwire.train.periodic",
    "roundtrip": "gradwire.train",
}
_ROOMS = ("lab", "memory", "methods", "optim")

__all__ = [
    "FORMAT_VERSION",
    "Analysis",
    "Audit",
    "ConfigurationError",
    "DensePolicy",
    "Deviation",
    "DivergenceError",
    "GradwireError",
    "Handle",
    "LabError",
    "PayloadError",
    "PerRank",
    "Periodic",
    "Roundtrip",
    "SecondMoments",
    "Stats",
    "Synchronizer",
    "WireError",
    "analyze",
    "compress",
    "lab",
    "memory",
    "methods",
    "optim",
    "periodic",
    "redistribute",
    "roundtrip",
]


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return import_module(f"gradwire.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'gradwire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
