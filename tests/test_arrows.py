"""What is imported when a module is loaded points one way: between folders, and between files."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import gradwire
import gradwire_bench

PACKAGES = [Path(package.__path__[0]) for package in (gradwire, gradwire_bench)]


def modules(package: Path) -> dict[str, Path]:
    """Files by their dotted names."""
    found = {}
    for file in package.rglob("*.py"):
        parts = file.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def loaded(body: Sequence[ast.AST]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run with the module: none in functions, and none for type checkers only."""
    for each in body:
        if isinstance(each, ast.Import | ast.ImportFrom):
            yield each
        elif isinstance(each, ast.Try | ast.With) or (isinstance(each, ast.If) and "TYPE" not in ast.dump(each.test)):
            yield from loaded([part for part in ast.walk(each) if isinstance(part, ast.Import | ast.ImportFrom)])


def imports(name: str, known: dict[str, Path]) -> set[str]:
    """Modules of the same package that a module loads, which knows the faces of folders by what they offer."""
    found = set()
    for each in loaded(ast.parse(known[name].read_text()).body):
        if isinstance(each, ast.Import):
            found |= {alias.name for alias in each.names}
        else:
            submodules = {f"{each.module}.{alias.name}" for alias in each.names}
            found |= (submodules & known.keys()) or {each.module or ""}
    return (found & known.keys()) - {name}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_files_import_one_another_in_one_order(package: Path) -> None:
    known = modules(package)
    assert len(known) > 50
    TopologicalSorter({name: imports(name, known) for name in known}).prepare()  # CycleError names the circle


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_folders_import_one_another_in_one_order(package: Path) -> None:
    known = modules(package)
    folders: dict[str, set[str]] = {}
    for name in known:
        if "." in name:
            own = name.split(".")[1]
            others = {other.split(".")[1] for other in imports(name, known) if "." in other}
            folders.setdefault(own, set()).update(others - {own})
    assert "kernels" in folders or package.name != "gradwire"
    TopologicalSorter(folders).prepare()
