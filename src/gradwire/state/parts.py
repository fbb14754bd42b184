"""A folder's checkpoint: each rank's states in a file of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import ConfigurationError
from gradwire.state.ranks import State, own, workers

_NAME = "gradwire-rank-"


def found(folder: Path) -> list[int]:
    """The ranks that have a file there."""
    return [int(path.stem.removeprefix(_NAME)) for path in folder.glob(f"{_NAME}*.pt")]


def write(folder: Path, states: list[State]) -> None:
    """Writes this rank's states; a file under its final name is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, dist.get_rank())
    torch.save({"workers": workers(), "states": states}, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
    if dist.get_rank() == 0:
        for rank in found(folder):
            if rank >= workers():  # left by a run of more workers
                _path(folder, rank).unlink()


def read(folder: Path) -> list[State] | None:
    """This rank's states, made of those of all ranks if there were more or fewer; None if there are none.

    Raises:
        ConfigurationError: If some are missing.
    """
    ranks = found(folder)
    if not ranks:
        return None
    if dist.get_rank() in ranks:
        mine = _content(folder, dist.get_rank())
        if mine["workers"] == workers():
            return list(mine["states"])
    first = _content(folder, 0)
    return own([_content(folder, rank)["states"] for rank in range(first["workers"])])


def _path(folder: Path, rank: int) -> Path:
    return folder / f"{_NAME}{rank}.pt"


def _content(folder: Path, rank: int) -> dict[str, Any]:
    path = _path(folder, rank)
    if not path.exists():
        raise ConfigurationError(f"there is no {path}; give a folder with the file of every rank")
    content = torch.load(path, weights_only=True)
    if not (isinstance(content, dict) and content.keys() == {"workers", "states"}):
        raise ConfigurationError(f"{path} was not written by gradwire.integrations; give a folder that was")
    return content
