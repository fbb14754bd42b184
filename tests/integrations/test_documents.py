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
