"""gradwire: data-parallel training, cheap on the wire.

>>> model = DistributedDataParallel(net)                     # doctest: +SKIP
>>> handle = gradwire.compress(model, "acpsgd", rank=4)      # doctest: +SKIP
"""

from gradwire import lab, memory, methods
from gradwire.errors import ConfigurationError, GradwireError, LabError, PayloadError
from gradwire.train import DensePolicy, Handle, Roundtrip, Synchronizer, compress, roundtrip
from gradwire.wire import Stats

__all__ = [
    "ConfigurationError",
    "DensePolicy",
    "GradwireError",
    "Handle",
    "LabError",
    "PayloadError",
    "Roundtrip",
    "Stats",
    "Synchronizer",
    "compress",
    "lab",
    "memory",
    "methods",
    "roundtrip",
]

__version__ = "0.1.0"
