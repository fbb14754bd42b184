"""The command line: ``gradwire methods | bench | doctor``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradwire.errors import GradwireError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradwire.bench.contenders import Contender
    from gradwire.bench.data import DataSource
    from gradwire.bench.sync import SyncRow
    from gradwire.bench.train import TrainRow

app = App(
    name="gradwire",
    help="Data-parallel training, cheap on the wire: every gradient compressor behind one line.",
    suppress_keyboard_interrupt=False,
)
bench = App(name="bench", help="Measure on this machine: averaging, training, kernels.")
app.command(bench)

Json = Annotated[Path | None, Parameter(name="--json")]
Methods = Annotated[list[str] | None, Parameter(name="--method", negative=())]
Positive = Annotated[int, Parameter(validator=Number(gte=1))]

USAGE_ERROR = 2
INTERRUPTED = 130
_LEAST_WIDTH = 120
"""Columns of a table that goes to a file or a pipe."""


@app.command
def methods(*, json: Json = None) -> None:
    """List the compression methods with their options.

    ```
    gradwire methods --json methods.json
    ```

    Args:
        json: Write the list to this file too.
    """
    import dataclasses

    import gradwire
    from gradwire.bench import report

    entries = []
    table = Table(title="Methods", title_justify="left", title_style="bold")
    for column in ("name", "what it does", "options", "source"):
        table.add_column(column)
    for name in gradwire.methods.names():
        method = gradwire.methods.get(name)
        options = {field.name: field.default for field in dataclasses.fields(method)}  # type: ignore[arg-type]
        summary = (method.__doc__ or "").strip().partition("\n")[0].replace("``", "")
        entries.append({"name": name, "summary": summary, "options": options, "citation": method.citation})
        table.add_row(name, summary, "\n".join(f"{key}={value}" for key, value in options.items()), method.citation)
    _console().print(table)
    _write(json, report.document("methods", methods=entries))


@bench.command
def sync(
    *,
    shapes: str = "resnet50",
    workers: Positive = 4,
    link: Annotated[list[str], Parameter(negative=())] = ["1gbit"],  # noqa: B006 - cyclopts shows it as the default
    method: Methods = None,
    steps: Positive = 10,
    json: Json = None,
) -> None:
    """Time the averaging of a model-shaped gradient through DDP, against DDP fp32 of the same run.

    Every contender averages the same gradients in turn; a step counts as long as its slowest worker took, from the
    start of backward to its end. Three warm-up steps do not count. Slow contenders get fewer steps, at least three.

    ```
    gradwire bench sync --link 1gbit --link 100mbit --link none
    gradwire bench sync --method acpsgd:rank=8 --method topk:ratio=0.001 --json sync.json
    ```

    Args:
        shapes: Whose shapes the gradient has: resnet50 (25.6 M parameters) or tiny.
        workers: Worker processes.
        link: Rate of each worker's link, such as 1gbit, or none for plain loopback; may be repeated.
        method: A contender, name:option=value,...; may be repeated. ddp is plain DDP, torch-powersgd is PyTorch's own
            hook. Ten contenders if not given.
        steps: Timed steps of each contender.
        json: Write all measurements to this file too.
    """
    from rich.live import Live

    from gradwire.bench import report
    from gradwire.bench import shapes as shape_sets
    from gradwire.bench import sync as bench_sync

    console = _console()
    numel = shape_sets.numel(shape_sets.get(shapes))
    racers = bench_sync.contenders(method or ())
    for each in link:
        bench_sync.link_rate(each)
    rows: list[SyncRow] = []
    for each in link:
        title = f"Averaging {numel / 1e6:.1f} M gradients ({shapes}), {workers} workers, link {each}"
        with Live(console=console, transient=True, auto_refresh=False) as live:

            def show(so_far: list[SyncRow], live: Live = live, title: str = title) -> None:
                live.update(report.sync_table(so_far, title), refresh=live.console.is_terminal)

            rows_of_link = bench_sync.measure_link(shapes, workers, each, racers, steps, show)
        console.print(report.sync_table(rows_of_link, title))
        rows += rows_of_link
    console.print(f"[dim]median of the steps, slowest worker; MB a worker and step; {report.machine_line()}[/dim]")
    _write(json, report.document("bench.sync", shapes=shapes, parameters=numel, workers=workers, rows=rows))
    _fail_if_nothing(rows)


@bench.command
def train(
    *,
    workers: Positive = 4,
    link: str = "100mbit",
    method: Methods = None,
    steps: Positive = 100,
    batch: Positive = 32,
    seed: int = 0,
    dataset: Literal["auto", "fashion-mnist", "digits"] = "auto",
    out: Path = Path("results"),
    json: Json = None,
) -> None:
    """Train a small CNN on real images over a slow network, with one method after another.

    Every method gets the same start, the same batches and the same number of steps. Leaves three pictures and a JSON.

    ```
    gradwire bench train
    gradwire bench train --link 1gbit --method topk:ratio=0.001 --method acpsgd:rank=2 --out results/fast
    ```

    Args:
        workers: Worker processes.
        link: Rate of each worker's link, such as 100mbit, or none for plain loopback.
        method: A contender, name:option=value,...; may be repeated. Six contenders if not given.
        steps: Steps of each contender.
        batch: Images a worker and step.
        seed: Seed of the model's start and of the order of the images.
        dataset: auto takes Fashion-MNIST where it can be had, else the digits of scikit-learn.
        out: Folder for the pictures and the JSON.
        json: Where the JSON goes; train.json in the folder if not given.
    """
    from gradwire import lab
    from gradwire.bench import data, report
    from gradwire.bench import train as bench_train
    from gradwire.bench.sync import NO_LINK, link_rate

    console = _console()
    racers = bench_train.contenders(method or ())
    rate = None if link_rate(link) is None else link
    if rate is not None and not (allowed := lab.availability()).possible:
        console.print(f"No shaped network here, so this runs on plain loopback: {allowed.reason}")
        rate, link = None, NO_LINK
    source = data.locate(dataset)
    console.print(f"Images: {source.name} ({source.reason}).")
    rows = _race(console, source, workers, rate, racers, steps=steps, batch=batch, seed=seed)
    where = f"{workers} workers, link {link}, {source.name}, {steps} steps of {workers * batch} images"
    console.print(report.train_table(rows, f"Training a CNN: {where}"))
    console.print(f"[dim]median step; MB a worker and step; {report.machine_line()}[/dim]")
    pictures = report.train_plots(rows, out, where)
    target = json or out / "train.json"
    facts = {"workers": workers, "link": link, "dataset": source.name, "steps": steps, "batch": batch, "seed": seed}
    report.write_json(target, report.document("bench.train", **facts, rows=rows))
    for path in (*pictures, target):
        console.print(f"Wrote {path}", soft_wrap=True)
    _fail_if_nothing(rows)


@bench.command
def kernels(
    *,
    numel: Positive = 25_000_000,
    repeats: Positive = 7,
    segments: Literal["one", "resnet"] = "one",
    json: Json = None,
) -> None:
    """Time the inner loops on one thread, as multiples of a copy of the same tensor.

    ```
    gradwire bench kernels --json kernels.json
    ```

    Args:
        numel: Elements of the gradient.
        repeats: Rounds; the median of them counts.
        segments: one segment of all elements, or the layers of ResNet-50.
        json: Write all measurements to this file too.
    """
    from gradwire.bench import kernels as bench_kernels
    from gradwire.bench import report

    console = _console()
    with console.status("compiling") as status:
        rows = bench_kernels.measure(
            numel, repeats, segments, lambda done, total, name: status.update(f"{done} of {total}  {name}")
        )
    console.print(
        report.kernels_table(rows, f"Inner loops, {numel / 1e6:g} M values, one thread, segments: {segments}")
    )
    console.print(f"[dim]median of {repeats} rounds; {report.machine_line()}[/dim]")
    _write(json, report.document("bench.kernels", numel=numel, repeats=repeats, segments=segments, rows=rows))


@app.command
def doctor(*, json: Json = None) -> None:
    """Say what this machine has and lacks for gradwire, and what to do about it.

    ```
    gradwire doctor
    ```

    Args:
        json: Write the findings to this file too.
    """
    from gradwire import diagnosis
    from gradwire.bench import report

    findings = diagnosis.examine()
    colours = {"ok": "green", "limited": "yellow", "broken": "red"}
    table = Table(title="This machine", title_justify="left", title_style="bold")
    for column in ("", "state", "found", "what to do"):
        table.add_column(column)
    for finding in findings:
        table.add_row(
            finding.subject,
            Text(finding.state, style=colours[finding.state]),
            Text(finding.found),
            Text(finding.remedy),
        )
    _console().print(table)
    _write(json, report.document("doctor", findings=findings))
    if any(finding.state == "broken" for finding in findings):
        raise GradwireError("gradwire cannot work here; see what is broken above")


def main() -> int:
    """Runs the command line; returns the exit code."""
    try:
        app(sys.argv[1:], exit_on_error=False, print_error=False, result_action="return_value")
    except (GradwireError, CycloptsError) as error:
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(console.width, _LEAST_WIDTH))


def _write(path: Path | None, content: dict[str, Any]) -> None:
    from gradwire.bench import report

    if path is not None:
        report.write_json(path, content)
        _console().print(f"Wrote {path}", soft_wrap=True)


def _race(
    console: Console, source: DataSource, workers: int, rate: str | None, racers: Sequence[Contender], **options: int
) -> list[TrainRow]:
    """Trains with a live bar for each contender."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from gradwire.bench import train as bench_train

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[news]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = [
            progress.add_task(racer.label, total=options["steps"], start=False, news="waiting") for racer in racers
        ]

        def show(rows: list[TrainRow]) -> None:
            for task, row in zip(tasks, rows, strict=True):
                if row.steps_done and not progress.tasks[task].started:
                    progress.start_task(task)
                if row.accuracy is not None:
                    progress.stop_task(task)
                progress.update(task, completed=row.steps_done, news=_news(row))

        return bench_train.race(source, workers, rate, racers, **options, on_progress=show)


def _news(row: TrainRow) -> str:
    if row.error:
        return row.error
    if row.loss is None:
        return "waiting"
    accuracy = row.accuracy if row.accuracy is not None else row.curve[-1].accuracy if row.curve else None
    return f"loss {row.loss:.2f}" + ("" if accuracy is None else f", accuracy {accuracy:.1%}")


def _fail_if_nothing(rows: Sequence[SyncRow] | Sequence[TrainRow]) -> None:
    if all(row.error for row in rows):
        raise GradwireError("no contender could be measured; the table says why")
