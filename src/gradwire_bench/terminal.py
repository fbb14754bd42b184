"""What a terminal shows: bars of trainings, how far measurements are, tables."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.status import Status
from rich.table import Table
from rich.text import Text


def bars(console: Console) -> Progress:
    """Bars that go when they end; a task says what is new in its field ``news``, which may be what a library said."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[news]}", markup=False),
        console=console,
        transient=True,
    )


def counted(status: Status) -> Callable[[int, int, str], None]:
    """What is told how many measurements are done, how many there are, and which is next, and shows it."""
    return lambda done, total, name: status.update(f"{done} of {total}  {name}")


def table(title: str, *columns: str, words: int = 1) -> Table:
    """An empty table. Heads and words break where there is little room, else they would vanish in 80 columns.

    Args:
        title: What it shows.
        columns: Heads.
        words: How many columns have words; the others have numbers.
    """
    made = Table(title=Text(title), title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < words else "right", overflow="fold")
    return made
