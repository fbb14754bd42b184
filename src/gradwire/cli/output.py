"""What commands print, and the files that they leave."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from gradwire.errors import GradwireError

if TYPE_CHECKING:
    from gradwire_bench.cell import Record

_LEAST_WIDTH = 120
"""Columns of a table that goes to a file or a pipe."""


def new_console() -> Console:
    """A console for standard output, wide enough for tables where it is no terminal and ``COLUMNS`` says nothing."""
    console = Console(highlight=False)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(highlight=False, width=max(console.width, _LEAST_WIDTH))


def wrote(*paths: Path) -> None:
    """Says which files are there now; brackets in their names are no markup."""
    new_console().print(Text(f"Wrote {' and '.join(map(str, paths))}"), soft_wrap=True)


def write(path: Path | None, content: dict[str, Any]) -> None:
    """Writes a JSON file if one is asked for, and says so."""
    from gradwire_bench import origin

    if path is not None:
        origin.write_json(path, content)
        wrote(path)


def keep(path: Path | None, records: Sequence[Record]) -> None:
    """Writes the records if a file is asked for, and says so.

    Raises:
        GradwireError: If nothing was measured.
    """
    from gradwire_bench.suite import ledger

    if path is not None:
        ledger.write(path, records)
        wrote(path)
    if all(each.error for each in records):
        raise GradwireError("no contender could be measured; the table says why")
