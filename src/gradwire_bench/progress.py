"""Live bars of trainings."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


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
