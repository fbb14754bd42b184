"""What commands print, and the files that they leave."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.console import Console

_LEAST_WIDTH = 120
"""Columns of a table that goes to a file or a pipe."""


def new_console() -> Console:
    """A console for standard output, wide enough for tables where it is no terminal and ``COLUMNS`` says nothing."""
    console = Console(highlight=False)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(highlight=False, width=max(console.width, _LEAST_WIDTH))


def write(path: Path | None, content: dict[str, Any]) -> None:
    """Writes a JSON file if one is asked for, and says so."""
    from gradwire_bench import report

    if path is not None:
        report.write_json(path, content)
        new_console().print(f"Wrote {path}", soft_wrap=True)
