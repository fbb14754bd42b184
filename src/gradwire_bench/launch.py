"""Worker processes of a benchmark, started through the lab, and what they tell while they work."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gradwire import lab
from gradwire.errors import ConfigurationError, LabError, did_you_mean

NO_LINK = "none"
"""The link that is no link: plain loopback."""

Event = dict[str, Any]
"""What :func:`gradwire_bench.worker.emit` told."""


def link_rate(link: str) -> int | None:
    """A link's rate in bits per second, ``None`` for plain loopback.

    Raises:
        ConfigurationError: If the text is neither a rate nor ``"none"``.
    """
    try:
        return None if link == NO_LINK else lab.parse_rate(link, "link")
    except ConfigurationError as error:
        hint = did_you_mean(link.lower(), [NO_LINK])
        raise ConfigurationError(f"{hint}{error}, or 'none' for plain loopback") from error


def launch(
    worker: str,
    job: Mapping[str, Any],
    workers: int,
    link: str,
    take: Callable[[Event], object],
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
    silence: float | None = None,
) -> None:
    """Runs a job in worker processes.

    Args:
        worker: The module that each of them runs.
        job: What it is to do; it is told, too, whether a worker's interface is its own: ``shaped``.
        workers: How many.
        link: Rate of each worker's link such as ``"1gbit"``, or ``"none"``.
        take: Given every event as it comes.
        environment: More variables for the workers.
        timeout: Seconds that they have; None for as long as they need.
        silence: Seconds that may pass without a word; None for as long as they like.

    Raises:
        LabError: If they ended before their time.
    """

    def on_line(rank: int, line: str) -> None:
        try:
            event = json.loads(line)
        except ValueError:  # what libraries print
            return
        if isinstance(event, dict) and "event" in event:
            take(event)

    shaped = link_rate(link) is not None
    command = [sys.executable, "-m", worker, json.dumps({**job, "shaped": shaped})]
    with lab.Lab(workers, link if shaped else None) as network:
        network.run(command, env=environment, timeout=timeout, silence=silence, on_line=on_line)


class Row(Protocol):
    """What is known of one of several contenders."""

    error: str | None


def race(
    worker: str,
    job: Mapping[str, Any],
    workers: int,
    link: str,
    rows: Sequence[Row],
    on_step: Callable[[Any, Event], object],
    on_progress: Callable[[], object],
    environment: Mapping[str, str] | None = None,
) -> None:
    """Has a job fill rows, of which each event names one by its number: ``row``.

    ``failed`` says why there is nothing to be known, ``result`` what the row's attributes are; a row that has neither
    when the workers end before their time says so.

    Args:
        worker: As for :func:`launch`, and so are the others.
        job: What it is to do.
        workers: How many.
        link: Rate of each worker's link.
        rows: Those that are filled.
        on_step: Given a row and any other event of it.
        on_progress: Called after every event.
        environment: More variables for the workers.

    Raises:
        LabError: If the workers ended before anything was told.
    """
    told, waiting = False, dict(enumerate(rows))

    def take(event: Event) -> None:
        nonlocal told
        told = True
        number, kind = event.pop("row"), event.pop("event")
        row = rows[number]
        match kind:
            case "failed":
                row.error = row.error or event["reason"]
            case "result":
                waiting.pop(number)
                for name, value in event.items():
                    setattr(row, name, value)
            case _:
                on_step(row, event)
        on_progress()

    try:
        launch(worker, job, workers, link, take, environment)
    except LabError as error:
        if not told:
            raise
        for row in waiting.values():
            row.error = row.error or ended_early(error)


def ended_early(error: LabError) -> str:
    """Why the workers of a run ended before their time, as one line: what happened, and the last that was said."""
    first, *rest = str(error).strip().splitlines()
    return f"the run ended early: {first} {rest[-1].strip() if rest else ''}".rstrip()
