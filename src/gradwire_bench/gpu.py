"""All that a GPU is needed for, in one go: bits, speeds, host waits, memory, and what a step of training takes longer.

``python -m gradwire_bench.gpu`` takes what ``gradwire bench gpu`` takes, and needs neither rich nor cyclopts.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gradwire.errors import ConfigurationError, GradwireError, LabError
from gradwire_bench import gpu_docs, gpu_report, launch, origin
from gradwire_bench.cell import Cell, Record
from gradwire_bench.placement import Device
from gradwire_bench.suite import ledger

PARTS: dict[str, float] = {
    "bits": 110.0,
    "methods": 110.0,
    "waits": 80.0,
    "memory": 60.0,
    "ranks": 110.0,
    "kernels:25000000": 100.0,
    "step:ResNet-50": 120.0,
    "step:GPT-2 124M": 120.0,
    "overlap:ResNet-50": 40.0,
    "kernels:125000000": 70.0,
    "kernels:1000000": 50.0,
}
"""How many seconds each may take."""

BESIDE: dict[str, int] = {"bits": 5, "methods": 4, "waits": 1, "memory": 1, "ranks": 1}
"""Parts that time nothing, which run at the same time, and in how many processes: most of it is compiling."""

CORES = 4
"""Of the processor, for each of these processes at least, but for one of each part."""

SECONDS = 450.0
"""All of them."""

SILENCE = 75.0
"""Seconds after which a subject hangs."""

WORKER = "gradwire_bench.gpu_part"

Told = Callable[[str], None]


def measure(device: Device, told: Told, keep: Callable[[Record], None], parts: Sequence[str] = tuple(PARTS)) -> None:
    """Runs each part in processes of its own; what crashes or hangs loses nothing but itself.

    Args:
        device: ``"cuda"``, or ``"cpu"`` to see that all of it runs, with sizes from which nothing is to be learnt.
        told: Told what is begun.
        keep: Given every record as it comes.
        parts: Of :data:`PARTS`.
    """
    end, lock, errors = time.monotonic() + SECONDS, threading.Lock(), list[BaseException]()

    def kept(record: Record) -> None:
        with lock:
            keep(record)

    def run(part: _Part) -> None:
        try:
            part.measure(min(end, time.monotonic() + PARTS[part.name]))
        except BaseException as error:  # which the thread that waits raises
            errors.append(error)

    threads = []
    for part, processes in BESIDE.items():
        of = max(min(processes, (os.cpu_count() or 1) // CORES), 1)
        threads += [
            threading.Thread(target=run, args=(_Part(part, device, told, kept, (share, of)),), daemon=True)
            for share in range(of if part in parts else 0)
        ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for part in parts:
        if part not in BESIDE and not errors:
            run(_Part(part, device, told, kept))
    if errors:
        raise errors[0]


@dataclass
class _Part:
    """A part as its processes tell it.

    Attributes:
        name: Of :data:`PARTS`.
        device: Where.
        told: As of :func:`measure`.
        keep: The same.
        share: Which of its subjects: of so many the one with a number, as of all that follow.
        machine: What they say of the device.
        known: Subjects that were begun.
        begun: The one that has not ended; empty if there is none.
    """

    name: str
    device: Device
    told: Told
    keep: Callable[[Record], None]
    share: tuple[int, int] = (0, 1)
    machine: dict[str, Any] = field(default_factory=dict)
    known: list[str] = field(default_factory=list)
    begun: str = ""

    def measure(self, end: float) -> None:
        """Until a time; another process begins behind the subject with which one ended too early."""
        while True:
            before, error = len(self.known), "no time was left for it"
            if (left := end - time.monotonic()) > 0:
                job = {"part": self.name, "device": self.device, "skipped": self.known, "share": self.share}
                try:
                    launch.launch(WORKER, job, 1, launch.NO_LINK, self._take, timeout=left, silence=SILENCE)
                    return
                except LabError as caught:
                    error = launch.ended_early(caught)
            if self.begun or len(self.known) == before:
                self._keep(self.begun or "the rest", {}, 0.0, error)
            if len(self.known) == before:
                return

    def _take(self, event: launch.Event) -> None:
        match event["event"]:
            case "machine":
                self.machine = event["facts"]
            case "begun":
                self.begun = event["subject"]
                self.known.append(self.begun)
                self.told(f"{self.name}  {self.begun}")
            case "done":
                self._keep(event["subject"], event["result"], event["seconds"], event["error"])

    def _keep(self, subject: str, result: dict[str, Any], seconds: float, error: str | None) -> None:
        self.begun = ""
        cell = Cell("gpu", self.name, subject, workers=1, steps=0, device=self.device)
        made = Record.now(cell, result, seconds, origin.command(), error)
        self.keep(replace(made, machine={**made.machine, **self.machine}))


def run(json: Path | None, plot: Path | None, docs: Path | None, rehearse: bool) -> None:
    """Measures, prints, and leaves what was asked for.

    Args:
        json: Where records go, one JSON a line, each at once.
        plot: Where a picture goes.
        docs: Folder whose pages are to say what was measured; without a GPU, what was measured before.
        rehearse: Whether to run everything small on the CPU.

    Raises:
        ConfigurationError: If torch sees no GPU, and neither a rehearsal nor pages were asked for; or if there are no
            such pages.
        GradwireError: If something could not be measured, when all else is.
    """
    records: list[Record] = []
    if docs is not None:
        gpu_docs.check(docs)
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
