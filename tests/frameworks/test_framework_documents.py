"""What docs/frameworks.md says is held, is held by a test of that name; and its examples are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire import methods

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "frameworks.md").read_text()
PACKAGES = ("jax", "keras", "optax", "tensorflow")


def test_every_test_is_there() -> None:
    named = set(re.findall(r"\(\.\./(tests/\S+\.py)#(test_\w+)\)", PAGE))
    assert len(named) > 15
    for path, name in named:
        assert f"\ndef {name}(" in (ROOT / path).read_text(), (path, name)


def test_every_example_is_there() -> None:
    told = set(re.findall(r"\(\.\./examples/(\w+\.py)\)", PAGE))
    assert len(told) == 3
    assert all((ROOT / "examples" / name).exists() for name in told)


def test_the_study_is_whole() -> None:
    section = PAGE.partition("\n## The sixteen methods of the GRACE study")[2].partition("\n## ")[0]
    command = section.partition("gradwire bench train ")[2].partition("--framework keras-tf")[0]
    rows = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert rows == ["dense", *command.replace("\\", "").split()]
    assert len(rows) == 17
    assert all(row.partition(":")[0] in methods.names() for row in rows)


def test_front_ends_are_small() -> None:
    ours = ROOT / "src" / "gradwire"
    files = [ours / "jax.py", ours / "tensorflow.py", *(ours / "keras").glob("*.py")]
    assert len(files) > 5
    assert sum(len(each.read_text().splitlines()) for each in files) <= 900


def test_gradwire_imports_none_of_them() -> None:
    command = (
        "import sys, gradwire; gradwire.compress, gradwire.periodic, gradwire.methods.names(); "
        f"assert not {{*{PACKAGES}}} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", command], check=True)


@pytest.mark.parametrize("package", ["jax", "keras", "tensorflow"])
def test_a_missing_package_is_named_with_its_remedy(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"gradwire.{package}", raising=False)
    with pytest.raises(ImportError, match=rf"{package}.*pip install 'gradwire\[{package}\]'"):
        __import__(f"gradwire.{package}")
