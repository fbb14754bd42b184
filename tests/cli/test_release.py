"""What a release says of itself is the same everywhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import gradwire

ROOT = Path(__file__).parents[2]


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == gradwire.__version__
    for path, line in (("CHANGELOG.md", r"^## (\S+)"), ("CITATION.cff", r"^version: (\S+)")):
        newest = re.search(line, (ROOT / path).read_text(), re.MULTILINE)
        assert newest is not None
        assert newest[1] == gradwire.__version__, path


def test_every_integration_has_an_extra_of_its_name() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for path in (ROOT / "src" / "gradwire" / "integrations").glob("*.py"):
        if "ImportError" in path.read_text():
            assert any(path.stem in each for each in extras[path.stem]), path.stem
