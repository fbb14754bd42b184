"""A table of figures, for a page or the terminal."""

from __future__ import annotations

from dataclasses import dataclass

import rich.table

from gradwire_bench.cell import Record


@dataclass(frozen=True)
class Value:
    """An entry of a table.

    Attributes:
        text: As shown.
        order: What it is sorted by; None comes last.
    """

    text: str
    order: float | str | None


@dataclass(frozen=True)
class Line:
    """A row.

    Attributes:
        values: By column.
        records: What it was made of.
    """

    values: dict[str, Value]
    records: list[Record]

    @property
    def commands(self) -> list[str]:
        """What measures it: one command for all seeds."""
        seeds: dict[str, list[str]] = {}
        for each in self.records:
            command, only, seed = each.command.partition(" --only seed=")
            seeds.setdefault(command, []).append(only + seed)
        return [command + "".join(dict.fromkeys(chosen)) for command, chosen in seeds.items()]


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: What it shows.
        about: How it was measured, in a sentence or two.
        lines: Rows, all with the same columns.
    """

    title: str
    about: str
    lines: list[Line]

    @property
    def columns(self) -> dict[str, bool]:
        """Heads, and whether what is below is words, not numbers."""
        return {name: isinstance(value.order, str) for name, value in self.lines[0].values.items()}

    def shown(self) -> rich.table.Table:
        """For the terminal."""
        table = rich.table.Table(title=self.title, title_justify="left", caption=self.about, caption_justify="left")
        for column, words in self.columns.items():
            table.add_column(column, justify="left" if words else "right")
        for line in self.lines:
            table.add_row(*(value.text for value in line.values.values()))
        return table
