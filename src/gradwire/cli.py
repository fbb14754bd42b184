"""The command line: ``gradwire methods | analyze | bench | doctor``."""

from __future__ import annotations

import sys
from dataclasses import replace
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
    from gradwire.bench.workloads import Workload

app = App(
    name="gradwire",
    help="Data-parallel training, cheap on the wire: every gradient compressor behind one line.",
    suppress_keyboard_interrupt=False,
)
bench = App(name="bench", help="Measure on this machine: averaging, training, kernels.")
app.command(bench)

Json = Annotated[Path | None, Parameter(name="--json")]
Methods = Annotated[list[str] | None, Parameter(name="--method", negative=())]
Section = Literal["claim", "speedup", "volume", "overhead"]
WorkloadName = Literal["image", "language"]
Positive = Annotated[int, Parameter(validator=Number(gte=1))]

USAGE_ERROR = 2
INTERRUPTED = 130
_LEAST_WIDTH = 120
"""Columns of a table that goes to a file or a pipe."""


@app.command
def methods(
    *names: str,
    numel: Annotated[int, Parameter(validator=Number(gte=0))] = 1_000_000,
    docs: Path | None = None,
    accuracy: Path | None = None,
    json: Json = None,
) -> None:
    """List the compression methods: class, routes, granularities, size on the wire and speed on this machine.

    ```
    gradwire methods
    gradwire methods topk dgc --numel 25000000
    gradwire methods --numel 0 --json methods.json
    gradwire methods --numel 25000000 --docs docs --accuracy results/train.json
    ```

    Args:
        names: Only these; all of them if none is given.
        numel: Elements of the gradient that is timed, in one matrix; 0 to measure nothing.
        docs: Write the page methods.md and its picture to this folder.
        accuracy: Training results of gradwire bench train, whose accuracies the page is to show.
        json: Write the list to this file too.
    """
    from gradwire.bench import catalogue, data, handbook, pictures, report
    from gradwire.bench.gradients import real_gradients

    console = _console()
    entries = catalogue.entries(names)
    accuracies = {} if accuracy is None else report.accuracy_gains(accuracy)
    measured: list[catalogue.Measurement] = []
    source = data.locate("auto") if docs is not None and numel else None
    if numel:
        with console.status("measuring") as status:
            measured = catalogue.measure(
                [entry.name for entry in entries],
                numel,
                real_gradients(source, catalogue.WORKERS) if source is not None else (),
                lambda done, total, name: status.update(f"{done} of {total}  {name}"),
            )
    console.print(handbook.table(entries, measured, "Methods"))
    if measured:
        console.print(f"[dim]one thread, {numel / 1e6:g} M values, 4 workers; {report.machine_line()}[/dim]")
    if docs is not None:
        where = f"{numel / 1e6:g} M values for the speeds; {report.machine_line()}"
        if source is not None:
            about = f"{source.name}, gradients of a CNN after 30 steps, {catalogue.WORKERS} workers"
            pictures.size_error_plot(entries, measured, docs / handbook.PICTURE, about)
        report.write_text(docs / "methods.md", handbook.page(entries, measured, where, accuracies))
        console.print(f"Wrote {docs / 'methods.md'}", soft_wrap=True)
    _write(json, report.document("methods", numel=numel, methods=entries, measured=measured))


@app.command
def analyze(
    *,
    method: Annotated[list[str], Parameter(negative=())] = ["topk:ratio=0.01", "qsgd:bits=4", "terngrad"],  # noqa: B006
    owner: str | None = None,
    steps: Annotated[int, Parameter(validator=Number(gte=0))] = 30,
    draws: Positive = 16,
    dataset: Literal["auto", "fashion-mnist", "digits"] = "auto",
    json: Json = None,
) -> None:
    """Measure what methods do to a CNN's real gradients, layer by layer, beside what theory says of it.

    Omega is how much longer the operator makes a gradient, E|Q(g)|²/|g|² - 1: positive for unbiased methods, negative
    for those that drop something. The layer-wise bound is the sum over layers of (1 + Omega_M)(1 + Omega_W), the
    entire-model bound the number of layers times the largest (Dutta et al. 2020, arXiv:1911.08250).

    ```
    gradwire analyze --method topk:ratio=0.001 --method terngrad
    gradwire analyze --method topk:ratio=0.01 --owner qsgd:8 --json analysis.json
    ```

    Args:
        method: A method, name:option=value,...; may be repeated.
        owner: What the average is compressed with again, such as qsgd:8.
        steps: Dense training steps before the gradients are taken.
        draws: Steps of randomness to average over.
        dataset: auto takes Fashion-MNIST where it can be had, else the digits of scikit-learn.
        json: Write all figures to this file too.
    """
    from gradwire import analysis
    from gradwire import methods as catalogue
    from gradwire.bench import data, report
    from gradwire.bench.contenders import Contender
    from gradwire.bench.gradients import real_gradients

    console = _console()
    chosen = [Contender.parse(each) for each in method]
    source = data.locate(dataset)
    found = {}
    with console.status("training") as status:
        (gradients,) = real_gradients(source, 1, steps)
        large = {name: each for name, each in gradients.items() if each.dim() > 1}
        for each in chosen:
            status.update(f"analyzing {each.label}")
            found[each.label] = analysis.analyze(
                large, catalogue.make(each.name, dict(each.options)), owner=owner, draws=draws
            )
    for label, result in found.items():
        console.print(report.analysis_table(label, result))
    console.print(f"[dim]gradients of a CNN on {source.name} after {steps} steps; {report.machine_line()}[/dim]")
    _write(json, report.document("analyze", dataset=source.name, steps=steps, draws=draws, analyses=found))


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
            hook, floor is DDP that sends nothing. Eleven contenders if not given.
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
    workload: WorkloadName = "image",
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
    """Train a small CNN on images, or a GRU on text, over a slow network, with one method after another.

    Every method gets the same start, the same batches and the same number of steps. Leaves three pictures and a JSON.

    ```
    gradwire bench train
    gradwire bench train --method all --link none --out results/all
    gradwire bench train --link 1gbit --method topk:ratio=0.001 --method acpsgd:rank=2 --out results/fast
    gradwire bench train --workload language --batch 16 --out results/language
    ```

    Args:
        workload: image is the CNN; language is a GRU that learns the next byte of the sources of Python's library.
        workers: Worker processes.
        link: Rate of each worker's link, such as 100mbit, or none for plain loopback.
        method: A contender, name:option=value,...; may be repeated; all is every method of the catalogue at its
            recommended settings. Six contenders if not given.
        steps: Steps of each contender.
        batch: Images, or pieces of 64 bytes, a worker and step.
        seed: Seed of the model's start and of the order of the samples.
        dataset: The images: auto takes Fashion-MNIST where it can be had, else the digits of scikit-learn.
        out: Folder for the pictures and the JSON.
        json: Where the JSON goes; train.json in the folder if not given.
    """
    from gradwire import lab
    from gradwire.bench import pictures, report
    from gradwire.bench import train as bench_train
    from gradwire.bench.sync import NO_LINK, link_rate
    from gradwire.bench.workloads import WORKLOADS

    console = _console()
    task = WORKLOADS[workload]
    racers = bench_train.contenders(method or ())
    rate = None if link_rate(link) is None else link
    if rate is not None and not (allowed := lab.availability()).possible:
        console.print(f"No shaped network here, so this runs on plain loopback: {allowed.reason}")
        rate, link = None, NO_LINK
    source = task.locate(dataset)
    console.print(f"Data: {source.name} ({source.reason}).")
    rows = _race(console, task, source, workers, rate, racers, steps=steps, batch=batch, seed=seed)
    where = f"{workers} workers, link {link}, {source.name}, {steps} steps of {workers * batch} {task.samples}"
    console.print(report.train_table(rows, f"Training a {task.what}: {where}"))
    console.print(f"[dim]median step; MB a worker and step; {report.machine_line()}[/dim]")
    drawn = pictures.train_plots(rows, out, where)
    target = json or out / "train.json"
    facts = {
        "workload": workload,
        "workers": workers,
        "link": link,
        "dataset": source.name,
        "steps": steps,
        "batch": batch,
        "seed": seed,
    }
    report.write_json(target, report.document("bench.train", **facts, rows=rows))
    for path in (*drawn, target):
        console.print(f"Wrote {path}", soft_wrap=True)
    _fail_if_nothing(rows)


@bench.command
def periodic(
    *,
    section: Annotated[list[Section], Parameter(negative=())] = ["claim", "speedup", "volume", "overhead"],  # noqa: B006
    workload: Annotated[list[WorkloadName], Parameter(negative=())] = ["image", "language"],  # noqa: B006
    link: str = "100mbit",
    seeds: Positive = 3,
    steps: Annotated[int, Parameter(validator=Number(gte=64))] = 960,
    batch: Positive | None = None,
    learning_rate: Annotated[float, Parameter(validator=Number(gt=0))] | None = None,
    shapes: str = "resnet50",
    dataset: Literal["auto", "fashion-mnist", "digits"] = "auto",
    out: Path = Path("results/periodic"),
) -> None:
    """Train with local steps and a compressed average now and then, against an fp32 average every step.

    claim: PQASGD at 3 to 5 % of the bytes, 4 and 8 workers. speedup: loss against workers times steps, 1 to 8 workers,
    on the loopback. volume: AdamW with ever fewer bytes, 4 workers, on the loopback. overhead: a step in which nothing
    is sent, the time of an average, and the waiting that a delay hides. Each leaves a JSON, and pictures; the JSON has
    all trainings that have ended, also while others still run.

    ```
    gradwire bench periodic
    gradwire bench periodic --section claim --workload language --seeds 1 --steps 400
    gradwire bench periodic --section claim --workload image --steps 15360 --batch 64 --learning-rate 0.4
    gradwire bench periodic --section overhead --link 1gbit
    ```

    Args:
        section: What to measure; may be repeated.
        workload: What claim and speedup train; may be repeated. volume trains the last one.
        link: Rate of each worker's link in claim and overhead, such as 100mbit, or none for plain loopback.
        seeds: Trainings of each plan, each with a start and an order of samples of its own.
        steps: Steps of all workers together in a training; volume takes twice as many.
        batch: Samples a worker and step; 16 images or 8 pieces of text if not given.
        learning_rate: Of SGD in claim and speedup, at its peak; 0.2 for images, 2 for text if not given.
        shapes: Whose shapes the average has that is timed, resnet50 (25.6 M parameters) or tiny.
        dataset: The images: auto takes Fashion-MNIST where it can be had, else the digits of scikit-learn.
        out: Folder for the JSON files and the pictures.
    """
    from gradwire import lab
    from gradwire.bench.periodic_report import Bench
    from gradwire.bench.sync import NO_LINK, link_rate
    from gradwire.bench.workloads import WORKLOADS

    console = _console()
    if link_rate(link) is not None and not (allowed := lab.availability()).possible:
        console.print(f"No shaped network here, so this runs on plain loopback: {allowed.reason}")
        link = NO_LINK
    bench = Bench(console, link, range(seeds), steps, dataset, batch, out)
    chosen = [WORKLOADS[name] for name in dict.fromkeys(workload)]
    if learning_rate is not None:
        chosen = [replace(each, learning_rate=learning_rate) for each in chosen]
    for each in dict.fromkeys(section):
        match each:
            case "claim":
                bench.claim(chosen)
            case "speedup":
                bench.speedup(chosen)
            case "volume":
                bench.volume(chosen[-1])
            case "overhead":
                bench.overhead(shapes)


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
    console: Console,
    workload: Workload,
    source: DataSource,
    workers: int,
    rate: str | None,
    racers: Sequence[Contender],
    **options: int,
) -> list[TrainRow]:
    """Trains with a live bar for each contender."""
    from gradwire.bench import train as bench_train
    from gradwire.bench.progress import bars

    with bars(console) as progress:
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

        return bench_train.race(workload, source, workers, rate, racers, **options, on_progress=show)


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
