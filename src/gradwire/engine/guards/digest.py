"""All ranks end a step with the same bits: a digest, compared from time to time, holds them to it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradwire.engine.guards.guard import Guard
from gradwire.engine.unit import Unit
from gradwire.errors import ConfigurationError, DivergenceError
from gradwire.wire.checked import checksum_of
from gradwire.wire.requests import AllGather, Synchronization


class Digest(Guard):
    """Compares digests of the averaged gradients over all ranks.

    A step's digest is gathered along with the first gradients of the next step: 8 bytes a rank. Only where they differ
    do the digests of all parameters follow, so that the error can name the first that differs.

    Args:
        every: Steps from one comparison to the next.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._step = 0
        self._taken: dict[str, Tensor] = {}
        self._due: dict[str, Tensor] = {}

    def beside(self, unit: Unit, gradient: Tensor) -> list[Synchronization]:
        """Sends what the last step left."""
        due, self._due = self._due, {}
        what = f"after step {self._step - 1} the averaged gradients are"
        return [compared(what, due)] if due else []

    def after_decode(self, unit: Unit, average: Tensor) -> None:
        """Takes the digests of a buffer's parameters."""
        if self._step % self._every == 0:
            for slot in unit.slots:
                self._taken[slot.name] = checksum_of(average[slot.offset : slot.stop])

    def after_step(self) -> None:
        """Has this step's digests sent with the next."""
        self._due, self._taken = self._taken, {}
        self._step += 1


def compared(what: str, digests: Mapping[str, Tensor]) -> Synchronization:
    """Compares digests over all ranks, in 8 bytes a rank; all of them follow only where they differ.

    Whether they do the host must know at once: there it waits for a device.

    Args:
        what: Says, up to the verb, what they are of.
        digests: ``int64[]`` by name, of the same names on all ranks; at least one.

    Raises:
        DivergenceError: On every rank, naming the first that differs.
    """
    each = torch.stack(list(digests.values()))
    everything = checksum_of(each).unsqueeze(0)
    rows = (
        (yield AllGather(everything.view(torch.uint8))).clone(memory_format=torch.contiguous_format).view(torch.int64)
    )
    if bool((rows == rows[0]).all()):
        return
    rows = (
        (yield AllGather(each.view(torch.uint8))).clone(memory_format=torch.contiguous_format).view(torch.int64).cpu()
    )
    differs = (rows != rows[0]).any(0).tolist()
    column = differs.index(True)
    name, values = list(digests)[column], rows[:, column].tolist()
    groups = [[rank for rank, other in enumerate(values) if other == value] for value in dict.fromkeys(values)]
    listed = " against ".join(f"rank{'s' * (len(group) > 1)} {', '.join(map(str, group))}" for group in groups)
    raise DivergenceError(
        f"{what} not the same on all ranks: {name!r} is the first of {sum(differs)} tensors that differ, {listed}; the "
        "weights have drifted apart since, so start all workers again from the last checkpoint, and look at the memory "
        "and software of the machine that differs"
    )


def check_verify_every(every: object) -> None:
    """Raises ConfigurationError unless it is a number of steps."""
    if not isinstance(every, int) or isinstance(every, bool) or every < 0:
        raise ConfigurationError(
            f"verify_every={every!r} is out of range; choose a whole number of steps, such as 100, or 0 for never"
        )
