"""Cases that share a test: all are run, and those that failed are named."""

from __future__ import annotations

import pytest

from together import together

seen: list[tuple[int, str]] = []


@together("number", [1, 2, 3])
@together(("text", "length"), [("ab", 2), ("c", 2)], ["two", "one"])
def of_all(number: int, text: str, length: int, wrong: int) -> None:
    seen.append((number, text))
    assert number != wrong, "another number"
    assert len(text) == length, f"of {number}"


def test_every_case_is_run_and_those_that_failed_are_named() -> None:
    with pytest.raises(AssertionError, match="number") as raised:
        of_all(wrong=1)
    assert seen == [(number, text) for number in (1, 2, 3) for text in ("ab", "c")]
    assert raised.value.__notes__ == ["failed: 1-two, 1-one, 2-one, 3-one"]


def test_what_pytest_fails_by_is_a_failure_too() -> None:
    @together("number", [1, 2])
    def nothing_is_raised(number: int) -> None:
        with pytest.raises(ValueError, match="1"):
            assert number

    with pytest.raises(pytest.fail.Exception) as raised:
        nothing_is_raised()
    assert raised.value.__notes__ == ["failed: 1, 2"]
