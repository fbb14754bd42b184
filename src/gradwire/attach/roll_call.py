"""Before anything is attached, or changed on all ranks: are all there, and ready?

Only then are configuration, parameters and their values compared (:mod:`gradwire.engine.agreement`).
"""

from __future__ import annotations

import logging
import time
from types import TracebackType

import torch.distributed as dist
from torch.distributed import distributed_c10d

from gradwire.errors import ConfigurationError
from gradwire.wire.transport import timeout_of

_log = logging.getLogger("gradwire")

PREPARING_SECONDS = 600.0
"""How long ranks that have come may take to get ready, which is to compile kernels, whatever the group's timeout."""

PATIENCE = 30.0
"""Seconds until it is said for whom the others wait."""

_READY = "all are ready"
_SHORTEST, _LONGEST = 0.001, 0.1
"""Seconds between two looks at what the others say."""


class RollCall:
    """An attachment to be, about which the ranks of a group tell each other before any collective.

    They do so through the store that the process group was made by: a rank that does not come, comes late or cannot
    attach disturbs no collective there, and keeps nobody waiting for the group's timeout to end. Within this context
    whatever one rank raises before it is ready is told to all. Attachments count by group, failed ones as well, so that
    all ranks may try again.

    Args:
        group: The workers; all of them if None. Nobody is told anything if it is no process group.
        purpose: What they come for, for messages.
    """

    def __init__(self, group: object, purpose: str = "attach") -> None:
        self._purpose = purpose
        initialised = dist.is_available() and dist.is_initialized()
        chosen = dist.group.WORLD if group is None and initialised else group
        self._group = chosen if isinstance(chosen, dist.ProcessGroup) and chosen.size() > 1 else None
        self._decided = self._group is None

    def __enter__(self) -> RollCall:
        if self._group is not None:
            store = distributed_c10d._get_default_store()
            self._store = distributed_c10d.PrefixStore(f"gradwire/{self._group.group_name}", store)
            self._rank = self._group.rank()
            self._number = self._store.add(str(self._rank), 1)
            self._verdict = f"{self._number} of all"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._decided:
            self._decide(f"rank {self._rank} could not {self._purpose}: {type(error).__name__}: {error}")

    @property
    def workers(self) -> int:
        """How many are to come."""
        return 1 if self._group is None else self._group.size()

    def ready(self) -> None:
        """Says that this rank can attach, and waits until all others can.

        Raises:
            ConfigurationError: On all ranks, if one of them cannot, saying why; or does not come within the group's
                timeout.
        """
        if self._group is None:
            return
        if self._store.add(f"{self._number} ready", 1) == self._group.size():
            self._decide(_READY)
        started, pause, told = time.monotonic(), _SHORTEST, False
        while not self._store.check([self._verdict]):
            seconds = time.monotonic() - started
            if absent := self._absent(self._group, seconds):
                self._decide(absent)
                break
            if seconds > PATIENCE and not told and (missing := self._missing(self._group)):
                told = True
                _log.warning(
                    "rank %s of %s has not come to %s yet; rank %s waits, until the process group's timeout is over",
                    *(missing, self._group.size(), self._purpose, self._rank),
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        self._decided = True
        verdict = self._store.get(self._verdict).decode()
        if verdict != _READY:
            raise ConfigurationError(verdict)

    def _decide(self, verdict: str) -> None:
        """Tells all ranks what becomes of the attachment, unless that is decided."""
        self._decided = True
        self._store.compare_set(self._verdict, "", verdict)

    def _absent(self, group: dist.ProcessGroup, seconds: float) -> str:
        """What keeps this rank from waiting any longer, if anything does."""
        limit = timeout_of(group)
        patience = PREPARING_SECONDS if limit is None else limit.total_seconds()
        if seconds < patience:
            return ""
        if missing := self._missing(group):
            return (
                f"rank {missing} of {group.size()} did not come to {self._purpose} within the process group's "
                f"timeout of {patience:g} s; {self._purpose} on all ranks of the group, in the same order"
            )
        if seconds < PREPARING_SECONDS:
            return ""
        return (
            f"some ranks came to {self._purpose}, and were not ready within {seconds:.0f} s; look at what each of them "
            "does, and start all of them again"
        )

    def _missing(self, group: dist.ProcessGroup) -> str:
        """Which ranks have not come."""
        return ", ".join(str(rank) for rank in range(group.size()) if self._store.add(str(rank), 0) < self._number)
