"""Real text for the benchmarks: the sources of Python's own standard library, which every machine has."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gradwire.errors import ConfigurationError
from gradwire_bench.data import DataSource

PYTHON_SOURCES = "Python's standard library"
SYMBOLS = 256
"""Values of a byte."""

_HELD_OUT = 10
"""Every tenth file is for the test."""
_LEAST_FILES = 2 * _HELD_OUT


@dataclass(frozen=True, eq=False)
class Text:
    """A text in memory, byte by byte.

    Attributes:
        name: The data set's name.
        train: ``uint8[N]``.
        test: ``uint8[M]``, from files of which the training part holds nothing.
    """

    name: str
    train: npt.NDArray[np.uint8]
    test: npt.NDArray[np.uint8]


def locate() -> DataSource:
    """Finds the modules that lie directly in the standard library's folder (4.7 MB in Python 3.11).

    Raises:
        ConfigurationError: If their sources are not on this machine.
    """
    directory = Path(sysconfig.get_path("stdlib"))
    if len(_files(directory)) < _LEAST_FILES:
        raise ConfigurationError(
            f"{directory} holds fewer than {_LEAST_FILES} Python sources, so there is no text to learn; "
            "run with a Python that comes with its standard library as files"
        )
    return DataSource(PYTHON_SOURCES, directory, f"found in {directory}")


def load(source: DataSource) -> Text:
    """Reads a text into memory; every tenth file in the order of names is held out.

    Raises:
        ConfigurationError: If the source names no folder.
    """
    if source.directory is None:
        raise ConfigurationError(
            f"{source.name!r} is not a text: take the source that gradwire_bench.text.locate gives"
        )
    contents = [np.frombuffer(path.read_bytes(), dtype=np.uint8) for path in _files(source.directory)]
    test = [content for number, content in enumerate(contents) if number % _HELD_OUT == _HELD_OUT - 1]
    train = [content for number, content in enumerate(contents) if number % _HELD_OUT != _HELD_OUT - 1]
    return Text(source.name, np.concatenate(train), np.concatenate(test))


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.py"))
