"""The file that keeps what was measured, a record a line, so that a run can end at any time and go on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from gradwire.errors import ConfigurationError
from gradwire_bench import origin
from gradwire_bench.cell import Cell, Record

FILE = "cells.jsonl"


def write(path: Path, records: Iterable[Record]) -> None:
    """Makes a file of records, in place of what it held.

    Raises:
        ConfigurationError: If it cannot be written.
    """
    origin.write_text(path, "".join(map(_line, records)))


def _line(record: Record) -> str:
    return json.dumps(record.plain()) + "\n"


class Ledger:
    """Records in a file; a later record of a cell takes the place of an earlier one.

    A last line that was cut off, as by a full disk, is left out, and its cell measured again; it goes when the next
    record comes, for who only reads may find one that is being written.

    Args:
        place: The file, ``.jsonl`` if it is not there yet, or the folder in which it lies or is to be made.

    Raises:
        ConfigurationError: If the file holds something else.
    """

    def __init__(self, place: Path) -> None:
        self.path = place if place.suffix == ".jsonl" or place.is_file() else place / FILE
        self._records: dict[Cell, Record] = {}
        self._whole: str | None = None
        if self.path.exists():
            try:
                *whole, rest = self.path.read_text(encoding="utf-8").split("\n")
            except (OSError, ValueError) as error:
                raise ConfigurationError(f"{self.path} holds no records: {error}; choose another folder") from error
            for number, line in enumerate(whole, start=1):
                try:
                    record = Record.of(json.loads(line))
                except ValueError as error:
                    raise ConfigurationError(
                        f"{self.path}, line {number}, is no record: {error}; choose another folder, or where that is "
                        "in a file of your own, add it by --import FILE"
                    ) from error
                self._records[record.cell] = record
            if rest:
                self._whole = "".join(f"{line}\n" for line in whole)

    @classmethod
    def read(cls, place: Path) -> Ledger:
        """A ledger that must be there.

        Raises:
            ConfigurationError: If it is not.
        """
        ledger = cls(place)
        if not ledger.path.is_file():
            made = "bench sync, train, kernels or codecs --json"
            if place.suffix != ".jsonl":
                made = f"bench suite --out {place}, or gradwire reproduce PAPER --out"
            raise ConfigurationError(f"{ledger.path} is not there; make it with gradwire {made} {place}")
        return ledger

    def add(self, record: Record) -> None:
        """Keeps a record, on disk at once."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._whole is not None:
                self.path.write_text(self._whole, encoding="utf-8")
                self._whole = None
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(record))
        except OSError as error:
            raise ConfigurationError(f"cannot write {self.path}: {error.strerror}; choose another folder") from error
        self._records[record.cell] = record

    def records(self, cells: Iterable[Cell] | None = None) -> list[Record]:
        """What is known of some cells in their order, or all."""
        if cells is None:
            return list(self._records.values())
        return [self._records[cell] for cell in cells if cell in self._records]

    def missing(self, cells: Sequence[Cell]) -> list[Cell]:
        """Cells without a result; one that failed is tried again."""
        return [cell for cell in cells if cell not in self._records or self._records[cell].error]
