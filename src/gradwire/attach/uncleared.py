"""Averages that are taken for gradients again, since nobody cleared them: part of them would wait in memories."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from gradwire.attach.shards import local
from gradwire.codecs.untouched import version
from gradwire.engine.mixture import Configured
from gradwire.memory import NoMemory

STEPS = 20
"""Steps that are looked at: a loop that leaves averages where they are does so from the first ones on."""

_log = logging.getLogger("gradwire")


class Uncleared:
    """Tells, once, of a gradient to which nothing came since it was averaged.

    Args:
        configuration: Without a memory the average of an average is nobody's loss.
        aloud: Whether this rank tells.
    """

    def __init__(self, configuration: Configured, aloud: bool) -> None:
        remembers = any(not isinstance(rule.memory, NoMemory) for rule in configuration.rules)
        self._steps = STEPS if aloud and remembers else 0
        self._left: dict[str, tuple[TensorWeakRef, int]] = {}

    def check(self, gradients: Mapping[str, Tensor]) -> None:
        """Looks at what is to be averaged, by the parameter's name."""
        for name, (left, then) in self._left.items():
            gradient = gradients.get(name)
            if gradient is not None and left() is gradient and version(local(gradient)) == then:
                _log.warning(
                    "the gradient of %r is what the step before averaged, and nothing came to it since: it counts as a "
                    "gradient once more, and the memory keeps part of it; clear gradients before each step, or where "
                    "optimizers take turns, have a Synchronizer for the parameters of each",
                    name,
                )
                self._steps = 0
                break
        self._left = {}

    def averaged(self, gradients: Mapping[str, Tensor]) -> None:
        """Notes what gradients are left as."""
        if self._steps:
            self._steps -= 1
            self._left = {name: (TensorWeakRef(each), version(local(each))) for name, each in gradients.items()}
