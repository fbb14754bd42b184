"""gradwire: data-parallel training, cheap on the wire.

>>> model = DistributedDataParallel(net)
>>> handle = gradwire.compress(model, "acpsgd", rank=4)

Names are loaded when they are first used, so that what needs no torch, such as the lab, does not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire import codecs, granularity, lab, memory, methods, optim, routes, wire
    from gradwire.attach import Handle, Owed, SecondMoments, Synchronizer, compress, compress_reduce_scatter
    from gradwire.engine import Audit, DensePolicy, Deviation, Stats
    from gradwire.engine.watch import watch
    from gradwire.errors import ConfigurationError, DivergenceError, GradwireError, LabError, PayloadError, WireError
    from gradwire.local import Analysis, Check, Roundtrip, analyze, check, roundtrip
    from gradwire.local_sgd import Periodic, periodic
    from gradwire.state import PerRank, redistribute

__version__ = "0.1.0"

_HOMES = {
    "FORMAT_VERSION": "gradwire.codecs.codec",
    "Analysis": "gradwire.local",
    "Audit": "gradwire.engine",
    "Check": "gradwire.local",
    "ConfigurationError": "gradwire.errors",
    "DensePolicy": "gradwire.engine",
    "Deviation": "gradwire.engine",
    "DivergenceError": "gradwire.errors",
    "GradwireError": "gradwire.errors",
    "Handle": "gradwire.attach",
    "LabError": "gradwire.errors",
    "Owed": "gradwire.attach",
    "PayloadError": "gradwire.errors",
    "PerRank": "gradwire.state",
    "Periodic": "gradwire.local_sgd",
    "Roundtrip": "gradwire.local",
    "SecondMoments": "gradwire.attach",
    "Stats": "gradwire.engine",
    "Synchronizer": "gradwire.attach",
    "WireError": "gradwire.errors",
    "analyze": "gradwire.local",
    "check": "gradwire.local",
    "compress": "gradwire.attach",
    "compress_reduce_scatter": "gradwire.attach",
    "redistribute": "gradwire.state",
    "periodic": "gradwire.local_sgd",
    "roundtrip": "gradwire.local",
    "watch": "gradwire.engine.watch",
}
_ROOMS = ("codecs", "granularity", "jax", "keras", "lab", "memory", "methods", "optim", "routes", "tensorflow", "wire")

__all__ = [
    "FORMAT_VERSION",
    "Analysis",
    "Audit",
    "Check",
    "ConfigurationError",
    "DensePolicy",
    "Deviation",
    "DivergenceError",
    "GradwireError",
    "Handle",
    "LabError",
    "Owed",
    "PayloadError",
    "PerRank",
    "Periodic",
    "Roundtrip",
    "SecondMoments",
    "Stats",
    "Synchronizer",
    "WireError",
    "analyze",
    "check",
    "codecs",
    "compress",
    "compress_reduce_scatter",
    "granularity",
    "lab",
    "memory",
    "methods",
    "optim",
    "periodic",
    "redistribute",
    "roundtrip",
    "routes",
    "watch",
    "wire",
]


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return import_module(f"gradwire.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'gradwire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
