"""Whether an index coding keeps what methods rely on: what it reads is what it wrote, in the same order."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.codecs import index
from gradwire.engine.configuration import Configuration
from gradwire.local.findings import BrokenError, SilentError

SETS = ((7, 40), (0, 40), (1, 1), (1, 40), (40, 40), (50, 5000), (4000, 5000))
"""How many positions below what."""


def positions_as_written(chosen: Configuration) -> None:
    """Raises BrokenError unless the positions of some sets are read as they were written, in the same order."""
    indices = getattr(chosen.method, "indices", None)
    if not isinstance(indices, str | index.IndexCoding):
        raise SilentError("it has no choice of how positions are written")
    coding = index.parse(indices)
    for count, universe in SETS:
        order = torch.randperm(universe, generator=torch.Generator().manual_seed(count))
        given = order[:count].sort().values
        found = _read(coding, given, universe)
        if not torch.equal(found, given):
            raise BrokenError(
                f"{type(coding).__name__} was given {count} positions below {universe}, {_first(given)}, and reads "
                f"{_first(found)}: decode must give what encode was given, in ascending order, each once"
            )


def _read(coding: index.IndexCoding, given: Tensor, universe: int) -> Tensor:
    payload = torch.zeros(coding.size(len(given), universe), dtype=torch.uint8)
    coding.encode(given.clone(), universe, payload)
    found = torch.full_like(given, -1)
    return found[: coding.decode(payload, universe, found)]


def _first(positions: Tensor) -> str:
    return ", ".join(map(str, positions[:3].tolist())) + (", ..." if len(positions) > 3 else "") or "none"
