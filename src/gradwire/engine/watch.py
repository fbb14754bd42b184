"""A line in the terminal that says what averages cost, while training goes on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch.distributed as dist
from rich.console import Console
from rich.live import Live
from rich.text import Text

from gradwire.engine.stats import Stats
from gradwire.errors import ConfigurationError
from gradwire.wire.transport import readable

_WINDOW = 30
"""Redrawings that rates are means over."""


class Counting(Protocol):
    """Whatever has counters: a handle, or what an integration returned."""

    def stats(self) -> Stats:
        """Totals of this rank."""


@contextmanager
def watch(counting: Counting, *, seconds: float = 1.0, console: Console | None = None) -> Iterator[None]:
    """Draws a line on rank 0 anew and anew: steps, their rate, bytes and times of late, or for how long none came.

    Where the output is no terminal, the line is written once, at the end. What is printed meanwhile goes above it.

    Args:
        counting: A handle, or whatever else has its ``stats()``.
        seconds: From one drawing to the next.
        console: Where to; standard error if None.

    Raises:
        ConfigurationError: If ``seconds`` is not above 0.

    Example:
        >>> with gradwire.watch(handle):
        ...     loss = model(inputs).sum()
    """
    if not seconds > 0:
        raise ConfigurationError(f"seconds={seconds!r} is out of range; choose more than 0, such as 1.0")
    if dist.is_initialized() and dist.get_rank():
        yield
        return
    counts = deque([(time.perf_counter(), counting.stats())], maxlen=_WINDOW)
    begun, first = counts[0]

    def line() -> Text:
        counts.append((time.perf_counter(), counting.stats()))
        return Text(said(list(counts)), no_wrap=True, overflow="ellipsis")

    console = Console(stderr=True) if console is None else console
    with Live(console=console, get_renderable=line, refresh_per_second=1 / seconds, transient=True):
        yield
    console.print(Text(said([(begun, first), (time.perf_counter(), counting.stats())])), soft_wrap=True)


def said(counts: list[tuple[float, Stats]]) -> str:
    """What the counts at several moments, in seconds, say of the time between the first and the last."""
    (then, earlier), (now, stats) = counts[0], counts[-1]
    recent = stats.since(earlier)
    if not recent.steps:
        return f"step {stats.steps:,}, none for {now - then:.0f} s"
    each = ", ".join(f"{stage} {1e3 * spent / recent.steps:.1f} ms" for stage, spent in recent.seconds.items())
    sent = f"{readable(recent.wire_bytes // recent.steps)} sent, {recent.ratio:.1f} times fewer bytes than dense"
    return (
        f"step {stats.steps:,}, {recent.steps / max(now - then, 1e-9):.1f} a second; a step: "
        f"{sent if recent.wire_bytes else 'nothing sent'}; {each}"
    )
