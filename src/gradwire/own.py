"""A user's own files: models, and what registers methods, routes and so on by name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

from gradwire.errors import ConfigurationError

VARIABLE = "GRADWIRE_IMPORT"
"""Environment variable with files and modules to import, separated as paths are: processes that are started have it."""


def add(places: Sequence[str]) -> None:
    """Imports files or modules, in this process and by :func:`load` in those that it starts.

    Raises:
        ConfigurationError: If there is no such file or module, it fails, or its name is that of another.
    """
    given = [str(Path(each).resolve()) if each.endswith(".py") else each for each in places]
    everything = dict.fromkeys([*listed(), *given])
    _check_names(everything)
    load(*everything)
    if everything:
        os.environ[VARIABLE] = os.pathsep.join(everything)


def _check_names(places: Iterable[str]) -> None:
    """Raises ConfigurationError where a file would take the place of another, or of one of Python's own modules."""
    known: dict[str, str] = {}
    for each in (place for place in places if place.endswith(".py")):
        name, path = Path(each).stem, str(Path(each).resolve())
        other = "Python's own module" if name in sys.stdlib_module_names else known.setdefault(name, path)
        if other != path:
            raise ConfigurationError(
                f"{each!r} would take the place of {other}, which is called {name}, too; rename it"
            )


def load(*places: str) -> None:
    """Imports what is given, or what :data:`VARIABLE` lists."""
    for each in places or listed():
        module(each, each)


def module(where: str, text: str) -> ModuleType:
    """A module by name, or a file's, which is run once.

    Args:
        where: Such as ``train.py``, ``folder/train.py`` or ``package.train``.
        text: What was written, for messages.

    Raises:
        ConfigurationError: If there is no such file or module, or it fails.
    """
    path = Path(where)
    try:
        if not where.endswith(".py"):
            sys.path.insert(0, str(Path.cwd()))
            return importlib.import_module(where)
        if not path.is_file():
            raise ConfigurationError(f"{text!r}: there is no file {where}; name one that there is, as ./train.py")
        known = sys.modules.get(path.stem)
        if known is not None and getattr(known, "__file__", None) == str(path.resolve()):
            return known
        specification = importlib.util.spec_from_file_location(path.stem, path.resolve())
        assert specification is not None, "the name ends in .py"
        assert specification.loader is not None
        found = importlib.util.module_from_spec(specification)
        sys.modules[path.stem] = found
        sys.path.insert(0, str(path.resolve().parent))
        try:
            specification.loader.exec_module(found)
        except BaseException:
            sys.modules.pop(path.stem, None)
            raise
        return found
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{text!r} cannot be imported: {type(error).__name__}: {error}") from error


def listed() -> list[str]:
    """Files and modules that were given, in this process or where it was started."""
    return [each for each in os.environ.get(VARIABLE, "").split(os.pathsep) if each]
