"""What docs/integrations.md says is held, is held by a test of that name; and its examples are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations.md").read_text()


def test_every_test_is_there() -> None:
    named = set(re.findall(r"\(\.\./(tests/\S+\.py)#(test_\w+)\)", PAGE))
    assert len(named) > 10
    for path, name in named:
        assert f"\ndef {name}(" in (ROOT / path).read_text(), (path, name)


def test_every_example_is_there() -> None:
    told = set(re.findall(r"\(\.\./examples/(\w+\.py)\)", PAGE))
    assert told <= {path.name for path in (ROOT / "examples").glob("*.py")}
    assert told >= {path.name for path in (ROOT / "examples").glob("with_*.py")}


def rows(first: str) -> list[list[str]]:
    """The cells of the table whose head begins so."""
    lines = PAGE[PAGE.index(first) :].splitlines()
    table = lines[2 : next(number for number, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in table]


def test_every_way_and_all_that_is_held_has_its_test() -> None:
    for first, least in (("| | tested with |", 9), ("| | Accelerate |", 8)):
        table = rows(first)
        assert len(table) >= least
        for name, *cells in table:
            assert any("](../tests/" in cell for cell in cells), name
    for name, *cells in rows("| | Accelerate |"):
        assert len(cells) == 5, name
        for cell in cells:
            assert not cell or "](../tests/integrations/" in cell, (name, cell)


def test_commands_of_examples_are_theirs() -> None:
    """What pages and examples have one paste: the file is there, and takes every option."""
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "examples").glob("*.py")]
    text = "\n".join(page.read_text().replace("\\\n", " ") for page in pages)
    commands = re.findall(r"(?:torchrun|python|gradwire lab)\b.*?(examples/\w+\.py)(.*)", text)
    assert {name for name, _ in commands} == {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
    for name, arguments in commands:
        script = (ROOT / name).read_text()
        for option in re.findall(r"--[\w-]+", arguments.partition("`")[0]):
            assert f'add_argument("{option}"' in script, (name, option)
