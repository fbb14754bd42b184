"""Nothing that a method writes, averages or remembers changes unnoticed: see ``golden.py``."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from golden import FOLDER, ROUNDED, differences, recorded, stored
from gradwire import methods


@pytest.fixture
def _filled() -> Iterator[None]:
    """Memory that nobody writes to holds something else than when the golden vectors were made."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_filled")
@pytest.mark.parametrize("method", methods.names())
def test_a_method_does_what_its_golden_vectors_hold(method: str) -> None:
    found = differences(stored(method), recorded(method), method in ROUNDED)
    remedy = f"if that is meant: make golden METHODS={method}, and FORMAT_VERSION + 1 if bytes mean something else"
    assert not found, "\n".join([f"{method} changed ({remedy}):", *found[:20]])


def test_every_file_is_a_method_and_all_are_small() -> None:
    files = list(FOLDER.iterdir())
    assert {file.name for file in files} == {f"{name}.json" for name in methods.names()}
    assert sum(file.stat().st_size for file in files) < 550_000


@pytest.mark.parametrize(("method", "change"), [("topk", 1e-6), ("powersgd", 1e-3)])
def test_a_changed_value_is_named(method: str, change: float) -> None:
    expected = stored(method)
    changed = copy.deepcopy(expected)
    case = next(iter(changed))
    changed[case]["step 1 average"][-1] *= 1 + change
    (told,) = differences(expected, changed, method in ROUNDED)
    assert told.startswith(f"{case}: step 1 average was ")
    del changed[case]["step 1 average"]
    assert differences(expected, changed, method in ROUNDED) == [f"{case}: step 1 average is gone"]
