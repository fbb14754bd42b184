"""Who rated what: MovieLens-100k, where it can be had."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gradwire.errors import ConfigurationError
from gradwire_bench.data import DataSource, cache_directory

MOVIELENS = "MovieLens-100k"
USERS, ITEMS, COUNT = 943, 1_682, 100_000

_FILES = ("u.data", "ml-100k.inter")
_SHA256 = "ec862504a8c24b195f5194e51fb18bb2d59428d00d96d6d1c63433a3bd5f2f47"
"""Of the table of users, items, ratings and times, ``int64`` in little endian, sorted."""

Table = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Ratings:
    """Ratings in memory; users and items are numbered from 0.

    Attributes:
        train: Users and items, ``int64[N, 2]``.
        test: Each user's last one, ``int64[943, 2]``.
        rated: Whether a user rated an item, ``bool[943, 1682]``.
    """

    train: Table
    test: Table
    rated: npt.NDArray[np.bool_]

    def unrated(self, users: npt.NDArray[np.int64], count: int, order: np.random.Generator) -> Table:
        """Items that users have not rated, ``int64[len(users), count]``; one may come twice."""
        found = order.integers(0, ITEMS, (len(users), count))
        while len(again := np.argwhere(self.rated[users[:, None], found])):
            found[tuple(again.T)] = order.integers(0, ITEMS, len(again))
        return found


def locate() -> DataSource:
    """Finds the ratings in the cache directory.

    Raises:
        ConfigurationError: If they are not there; it says how to get them.
    """
    folder = cache_directory() / "ml-100k"
    if any((folder / name).is_file() for name in _FILES):
        return DataSource(MOVIELENS, folder, f"found in {folder}")
    raise ConfigurationError(
        f"{MOVIELENS} is not in {folder}, and its licence does not let us hand it on: take u.data from "
        "https://files.grouplens.org/datasets/movielens/ml-100k.zip, or ml-100k.inter from the wheel that "
        "`pip download --no-deps recbole` leaves (unzip it), and put it there"
    )


def load(source: DataSource, sha256: str = _SHA256) -> Ratings:
    """Reads the ratings of either file.

    Args:
        source: Where.
        sha256: What they must come to.

    Raises:
        ConfigurationError: If they are others than the known ones.
    """
    folder = source.directory or Path()
    path = next(folder / name for name in _FILES if (folder / name).is_file())
    content = np.loadtxt(path, skiprows=1 if path.suffix == ".inter" else 0).astype(np.int64)
    content = content[np.lexsort(content.T[::-1])]
    found = hashlib.sha256(content.astype("<i8").tobytes()).hexdigest()
    if found != sha256:
        raise ConfigurationError(
            f"{path} is not {MOVIELENS}: its ratings have the SHA-256 {found}, not {sha256}; get it again"
        )
    users, items = int(content[:, 0].max()), int(content[:, 1].max())
    rated = np.zeros((max(users, USERS), max(items, ITEMS)), np.bool_)
    rated[content[:, 0] - 1, content[:, 1] - 1] = True
    order = np.lexsort((content[:, 3], content[:, 0]))
    pairs = content[order][:, :2] - 1
    last = np.append(pairs[1:, 0] != pairs[:-1, 0], True)
    return Ratings(np.ascontiguousarray(pairs[~last]), np.ascontiguousarray(pairs[last]), rated)
