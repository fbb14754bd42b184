"""From buffers of gradients to methods: all choices of an attachment, and what is done around every average."""

from gradwire.engine.choices import Choices
from gradwire.engine.configuration import Configuration
from gradwire.engine.engine import Engine
from gradwire.engine.guards import Audit, Deviation
from gradwire.engine.mixture import Methods, Mixture
from gradwire.engine.recipes import RECIPE
from gradwire.engine.stats import Stats
from gradwire.engine.unit import Unit
from gradwire.policy import DensePolicy

__all__ = [
    "RECIPE",
    "Audit",
    "Choices",
    "Configuration",
    "DensePolicy",
    "Deviation",
    "Engine",
    "Methods",
    "Mixture",
    "Stats",
    "Unit",
]
