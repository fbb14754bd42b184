"""All that a GPU is needed for, in one go: bits, speeds, host waits, memory, and what a step of training takes longer.

``python -m gradwire_bench.gpu`` takes what ``gradwire bench gpu`` takes, and needs neither rich nor cyclopts.
"""

from __future__ import annotations

import argparse
import json as jsons
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gradwire.errors import ConfigurationError, GradwireError
from gradwire_bench import gpu_docs, gpu_report, origin
from gradwire_bench.placement import Device
from gradwire_bench.suite import ledger
from gradwire_bench.suite.cell import Cell, Record

PARTS: dict[str, float] = {
    "kernels:25000000": 150.0,
    "step:ResNet-50": 70.0,
    "step:GPT-2 124M": 80.0,
    "bits": 110.0,
    "waits": 40.0,
    "memory": 40.0,
    "overlap:ResNet-50": 40.0,
    "ranks": 90.0,
    "kernels:125000000": 70.0,
    "kernels:1000000": 50.0,
}
"""What is worth most first, and how many seconds each may take."""

SECONDS = 450.0
"""All of them."""

SILENCE = 75.0
"""Seconds after which a subject hangs."""

WORKER = [sys.executable, "-m", "gradwire_bench.gpu_part"]

Told = Callable[[str], None]


def measure(device: Device, told: Told, keep: Callable[[Record], None], parts: Sequence[str] = tuple(PARTS)) -> None:
    """Runs each part in a process of its own; what crashes or hangs loses nothing but itself.

    Args:
        device: ``"cuda"``, or ``"cpu"`` to see that all of it runs, with sizes from which nothing is to be learnt.
        told: Told what is begun.
        keep: Given every record as it comes.
        parts: Of :data:`PARTS`.
    """
    end = time.monotonic() + SECONDS
    for part in parts:
        machine: dict[str, Any] = {}
        for event in _of_part(part, device, min(end, time.monotonic() + PARTS[part])):
            match event["event"]:
                case "machine":
                    machine = event["facts"]
                case "begun":
                    told(f"{part}  {event['subject']}")
                case "done":
                    cell = Cell("gpu", part, event["subject"], workers=1, steps=0, device=device)
                    made = Record.now(cell, event["result"], event["seconds"], origin.command(), event["error"])
                    keep(replace(made, machine={**made.machine, **machine}))


def _of_part(part: str, device: Device, end: float) -> Iterator[dict[str, Any]]:
    """What its processes tell: another one begins behind the subject with which one ended too early."""
    skipped: list[str] = []
    while True:
        known, begun = len(skipped), ""
        error = "no time was left for it"
        if time.monotonic() < end:
            with _Process(part, device, skipped) as process:
                for event in process.events(end):
                    if event["event"] == "begun":
                        begun = event["subject"]
                        skipped.append(begun)
                    elif event["event"] == "done":
                        begun = ""
                    yield event
                error = process.ending
        if not error:
            return
        if begun or len(skipped) == known:
            subject = begun or "the rest"
            yield {"event": "done", "subject": subject, "result": {}, "seconds": 0.0, "error": error}
        if len(skipped) == known:
            return


class _Process:
    """One that measures a part.

    Attributes:
        ending: Why it ended before its time; empty if it did not.
    """

    def __init__(self, part: str, device: Device, skipped: list[str]) -> None:
        self.ending = ""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed on leaving
        command = [*WORKER, part, device, jsons.dumps(skipped)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._errors, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *caught: object) -> None:
        with self._errors:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def events(self, end: float) -> Iterator[dict[str, Any]]:
        """What it tells, until it ends, is silent for too long, or its time is over."""
        try:
            for line in self._lines(end):
                try:
                    event = jsons.loads(line)
                except ValueError:  # what libraries print
                    continue
                if isinstance(event, dict) and "event" in event:
                    yield event
        except TimeoutError as error:
            self.ending = str(error)
            return
        if code := self._process.wait():
            self._errors.seek(0)
            last = (self._errors.read().strip().splitlines() or ["it said nothing"])[-1]
            self.ending = f"the process ended with {code}: {last[:300]}"

    def _lines(self, end: float) -> Iterator[bytes]:
        assert self._process.stdout is not None
        rest = b""
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                patience = min(SILENCE, end - time.monotonic())
                if not ready.select(max(patience, 0.0)):
                    raise TimeoutError("its time was over" if patience < SILENCE else f"silent for {SILENCE:g} s")
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                if not chunk:
                    return
                *whole, rest = (rest + chunk).split(b"\n")
                yield from whole


def run(json: Path | None, plot: Path | None, docs: Path | None, rehearse: bool) -> None:
    """Measures, prints, and leaves what was asked for.

    Args:
        json: Where records go, one JSON a line, each at once.
        plot: Where a picture goes.
        docs: Folder whose pages are to say what was measured; without a GPU, what was measured before.
        rehearse: Whether to run everything small on the CPU.

    Raises:
        ConfigurationError: If torch sees no GPU, and neither a rehearsal nor pages were asked for.
        GradwireError: If something could not be measured, when all else is.
    """
    records: list[Record] = []
    if not (rehearse or torch.cuda.is_available()):
        if docs is None:
            raise ConfigurationError(
                f"torch {torch.__version__} sees no GPU here; run this where `torch.cuda.is_available()` says True. "
                "Without one, `make test-gpu-kernels` checks the kernels' bits, and --rehearse that all of this runs"
            )
        records = gpu_docs.kept(docs)
    else:

        def keep(record: Record) -> None:
            records.append(record)
            if json is not None:
                ledger.write(json, records)

        measure("cpu" if rehearse else "cuda", lambda text: print(text, file=sys.stderr, flush=True), keep)
        print(*gpu_report.lines(records), sep="\n", flush=True)
    if docs is not None:
        gpu_docs.write(docs, gpu_docs.kept(docs) if rehearse else records)
        print(f"Wrote {docs / gpu_docs.PAGE}, {docs / gpu_docs.TABLES}")
    if plot is not None:
        try:
            from gradwire_bench.gpu_picture import draw

            draw(records, plot)
            print(f"Wrote {plot}")
        except (ConfigurationError, ImportError) as error:
            print(f"No picture: {error}")
    if failed := sum(record.error is not None for record in records):
        raise GradwireError(f"{failed} of {len(records)} measurements failed; their lines say why")


def main() -> int:
    """The command without a command line library."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where records go, one JSON a line")
    parser.add_argument("--plot", type=Path, help="where a picture goes")
    parser.add_argument("--docs", type=Path, help="folder whose pages are to say what was measured")
    parser.add_argument("--rehearse", action="store_true", help="run everything small on the CPU")
    chosen = parser.parse_args()
    try:
        run(chosen.json, chosen.plot, chosen.docs, chosen.rehearse)
    except GradwireError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
