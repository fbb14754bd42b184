"""gradwire: data-parallel training, cheap on the wire.

>>> model = DistributedDataParallel(net)                     # doctest: +SKIP
>>> handle = gradwire.compress(model, "acpsgd", rank=4)      # doctest: +SKIP

Names are loaded when they are first used, so that what needs no torch, such as the lab, does not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire import lab, memory, methods
    from gradwire.analysis import Analysis, analyze
    from gradwire.errors import ConfigurationError, DivergenceError, GradwireError, LabError, PayloadError, WireError
    from gradwire.train import DensePolicy, Handle, Roundtrip, SecondMoments, Synchronizer, compress, roundtrip
    from gradwire.wire import Stats

__version__ = "0.1.0"

_HOMES = {
    "Analysis": "gradwire.analysis",
    "ConfigurationError": "gradwire.errors",
    "DensePolicy": "gradwire.train",
    "DivergenceError": "gradwire.errors",
    "GradwireError": "gradwire.errors",
    "Handle": "gradwire.train",
    "LabError": "gradwire.errors",
    "PayloadError": "gradwire.errors",
    "Roundtrip": "gradwire.train",
    "SecondMoments": "gradwire.train",
    "Stats": "gradwire.wire",
    "Synchronizer": "gradwire.train",
    "WireError": "gradwire.errors",
    "analyze": "gradwire.analysis",
    "compress": "gradwire.train",
    "roundtrip": "gradwire.train",
}
_ROOMS = ("lab", "memory", "methods")

__all__ = [
    "Analysis",
    "ConfigurationError",
    "DensePolicy",
    "DivergenceError",
    "GradwireError",
    "Handle",
    "LabError",
    "PayloadError",
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
