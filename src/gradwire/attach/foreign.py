"""Handles of what other frameworks train: whether all ranks have the same, and states beside the framework's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from gradwire.attach.elsewhere import Cell, bytes_of
from gradwire.attach.handle import Handle
from gradwire.attach.roll_call import RollCall
from gradwire.engine.agreement import check_equal, check_same
from gradwire.errors import ConfigurationError
from gradwire.state import parts
from gradwire.state.ranks import Agreed


class Foreign(Handle):
    """A handle of arrays that another framework has."""

    def save(self, folder: str | Path) -> None:
        """Writes what this rank remembers to a file of its own in ``folder``; to be called on all ranks."""
        parts.write(Path(folder), [self.state_dict()])

    def load(self, folder: str | Path) -> None:
        """Goes on from what :meth:`save` wrote on all ranks, also of another number of workers; on all ranks.

        Raises:
            ConfigurationError: On all ranks, if a state is missing or does not fit, or ranks have those of different
                steps.
        """
        with Agreed() as agreed:
            if (states := parts.read(Path(folder))) is None:
                raise ConfigurationError(f"{folder} has no states of gradwire; give the folder that save was given")
            self.load_state_dict(states[0])
            agreed.step = self.engine.step

    def roll_call(self, purpose: str) -> RollCall:
        """All ranks do something, or all raise what keeps one of them from it; see there."""
        return RollCall(self._sibling(), purpose)

    def check_same(self, lines: Sequence[str], remedy: str) -> None:
        """Raises ConfigurationError on all ranks unless all have the same text."""
        self.wire.call(lambda: check_same(lines, self._transport, self.engine.store.device, remedy))

    def check_equal(self, cells: Iterable[Cell]) -> None:
        """Raises ConfigurationError on all ranks, and closes the handle, unless all have the same bits."""
        given, device = [(cell.name, bytes_of(np.array(cell.read()))) for cell in cells], self.engine.store.device
        try:
            self.wire.call(lambda: check_equal(given, self._transport, device, "broadcast rank 0's values before"))
        except ConfigurationError:
            self.close()
            raise
