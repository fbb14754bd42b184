"""The line that follows a training."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

import gradwire
from gradwire import Stats
from gradwire.engine.watch import said


class Counter:
    """A training that takes a step whenever somebody looks."""

    def __init__(self) -> None:
        self.steps = 0

    def stats(self) -> Stats:
        self.steps += 1
        return counted(self.steps)


def counted(steps: int) -> Stats:
    return Stats(steps, 4_000_000 * steps, 250_000 * steps, {"encode": 0.002 * steps, "wire": 0.01 * steps})


def test_it_says_what_steps_cost_of_late() -> None:
    assert said([(10.0, counted(40)), (11.0, counted(60)), (12.0, counted(1040))]) == (
        "step 1,040, 500.0 a second; a step: 250.0 kB sent, 16.0 times fewer bytes than dense; encode 2.0 ms, "
        "wire 10.0 ms"
    )
    assert said([(10.0, counted(40)), (17.2, counted(40))]) == "step 40, none for 7 s"
    assert "a step: nothing sent; " in said([(1.0, Stats(0, 0, 0, {})), (2.0, Stats(1, 0, 0, {}))])


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_it_is_drawn_at_times_that_there_are(seconds: float) -> None:
    watching = gradwire.watch(Counter(), seconds=seconds)
    with pytest.raises(gradwire.ConfigurationError, match=f"seconds={seconds}"), watching:
        pass


@pytest.mark.parametrize("terminal", [False, True])
def test_it_leaves_one_line_of_all(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, color_system=None)
    with pytest.raises(KeyboardInterrupt), gradwire.watch(Counter(), seconds=0.01, console=console):
        raise KeyboardInterrupt
    if terminal:
        assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")  # the cursor is there again
    out.seek(0)
    out.truncate()
    with gradwire.watch(Counter(), seconds=0.01, console=console):
        console.print("an epoch")
    *_, last = out.getvalue().splitlines()
    assert "times fewer bytes than dense; encode 2.0 ms, wire 10.0 ms" in last
    assert "an epoch" in out.getvalue()
