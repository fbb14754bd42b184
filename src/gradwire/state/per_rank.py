"""The state of every rank in one checkpoint of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gradwire.errors import ConfigurationError


class Remembering(Protocol):
    """What has a state of its own on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """The rank's state."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Goes on from a state."""


class PerRank:
    """A handle or optimizer as ``torch.distributed.checkpoint`` takes it: a ``Stateful`` with a key for each rank.

    That checkpoint takes equal keys on several ranks for copies of one value and keeps one of them, but what a rank
    remembers is its own. So each rank's state goes in as bytes under the rank's own key, by its rank in the default
    group: handles of several groups may share a name. To be read again by the same ranks.

    Args:
        handle: What :func:`gradwire.compress` returned, a :class:`gradwire.Synchronizer`, or an optimizer of
            :mod:`gradwire.optim`.

    Example:
        >>> _ = dcp.save({"model": model, "gradwire": gradwire.PerRank(handle)}, checkpoint_id=path)
        >>> dcp.load({"model": model, "gradwire": gradwire.PerRank(handle)}, checkpoint_id=path)
    """

    def __init__(self, handle: Remembering) -> None:
        self._handle = handle
        self._key = f"rank {dist.get_rank()}"

    def state_dict(self) -> dict[str, Any]:
        """The rank's state as ``torch.save`` writes it."""
        buffer = io.BytesIO()
        torch.save(self._handle.state_dict(), buffer)
        return {self._key: buffer.getvalue()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned.

        Raises:
            ConfigurationError: If there is no state of this rank, or it does not fit; nothing is changed.
        """
        if not isinstance(state.get(self._key), bytes):
            raise ConfigurationError(f"the checkpoint has no state of {self._key}; it has {', '.join(state) or 'none'}")
        self._handle.load_state_dict(torch.load(io.BytesIO(state[self._key]), weights_only=True))
