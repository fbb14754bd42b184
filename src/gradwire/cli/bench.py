"""``gradwire bench sync | train | periodic``: measurements over networks."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console

from gradwire.cli.arguments import Backend, Dataset, Device, Json, Methods, OutputFolder, Positive, Whole, WorkloadName
from gradwire.cli.output import keep, new_console, wrote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradwire_bench.cell import Cell
    from gradwire_bench.data import DataSource
    from gradwire_bench.sync import SyncRow
    from gradwire_bench.train import TrainRow

Framework = Literal["torch", "keras-tf", "keras-jax", "jax"]
Section = Literal["claim", "speedup", "volume", "overhead"]

bench = App(name="bench", help="Measure on this machine: averaging, training, kernels.")


@bench.command
def sync(
    method: Methods = None,
    *,
    shapes: str = "resnet50",
    workers: Positive = 4,
    link: Annotated[list[str], Parameter(negative=())] = ["1gbit"],  # noqa: B006 - cyclopts shows it as the default
    steps: Positive = 10,
    json: Json = None,
) -> None:
    """Time the averaging of a model-shaped gradient through DDP, against DDP fp32 of the same run.

    Every contender averages the same gradients in turn; a step counts as long as its slowest worker took, from the
    start of backward to its end. Three warm-up steps do not count. Slow contenders get fewer steps, at least three.

    ```
    gradwire bench sync --link 1gbit --link 100mbit --link none
    gradwire bench sync ddp acpsgd:rank=8 topk:ratio=0.001 --json sync.jsonl
    ```

    Args:
        method: Contenders, name:option=value,...; with or without the flag. ddp is plain DDP, torch-powersgd is
            PyTorch's own hook, floor is DDP that sends nothing. Eleven contenders if not given.
        shapes: Whose shapes the gradient has, as of gradwire simulate: resnet50 has 25.6 M parameters.
        workers: Worker processes.
        link: Rate of each worker's link, such as 1gbit, or none for plain loopback; may be repeated.
        steps: Timed steps of each contender.
        json: Write all measurements to this file too.
    """
    from rich.live import Live

    from gradwire_bench import origin, report
    from gradwire_bench import shapes as shape_sets
    from gradwire_bench import sync as bench_sync
    from gradwire_bench.cell import Cell, Record
    from gradwire_bench.suite import run

    console = new_console()
    racers = bench_sync.contenders(method or ())
    heats = [
        [Cell("sync", shapes, str(racer), workers=workers, link=each, steps=steps) for racer in racers] for each in link
    ]
    numel = shape_sets.numel(shape_sets.get(shapes))
    records: list[Record] = []
    for cells in heats:
        started = time.monotonic()
        title = f"Averaging {numel / 1e6:.1f} M gradients ({shapes}), {workers} workers, link {cells[0].link}"
        with Live(console=console, transient=True, auto_refresh=False) as live:

            def show(so_far: list[SyncRow], live: Live = live, title: str = title) -> None:
                live.update(report.sync_table(so_far, title), refresh=live.console.is_terminal)

            rows = bench_sync.race(cells, show)
        console.print(report.sync_table(rows, title))
        records += run.records(cells, run.averages(rows, cells[0]), started)
    console.print(f"[dim]median of the steps, slowest worker; MB a worker and step; {origin.machine_line()}[/dim]")
    keep(json, records)


@bench.command
def train(
    method: Methods = None,
    *,
    workload: WorkloadName = "image",
    workers: Positive = 4,
    link: str = "100mbit",
    steps: Positive = 100,
    batch: Positive = 32,
    seed: Whole = 0,
    dataset: Dataset = "auto",
    framework: Framework = "torch",
    device: Device = "cpu",
    backend: Backend = "gloo",
    out: OutputFolder = Path("results"),
    json: Json = None,
) -> None:
    """Train a small model over a slow network, with one method after another.

    Every method gets the same start, the same batches and the same number of steps. Leaves three pictures and the
    records that gradwire bench compare and gradwire methods --accuracy read.

    ```
    gradwire bench train
    gradwire bench train all --link none --out results/all
    gradwire bench train topk:ratio=0.001 acpsgd:rank=2 --link 1gbit --out results/fast
    gradwire bench train --workload language --batch 16 --out results/language
    gradwire bench train --framework keras-tf --out results/keras
    ```

    Args:
        method: Contenders, name:option=value,...; with or without the flag; all is every method of the catalogue at its
            recommended settings. Six contenders if not given.
        workload: image is a CNN, as resnet20, resnet9, vgg16 and alexnet are; language, lstm and gpt learn the next
            byte of the sources of Python's library; ncf recommends films, unet finds items on canvases.
        workers: Worker processes.
        link: Rate of each worker's link, such as 100mbit, or none for plain loopback.
        steps: Steps of each contender.
        batch: Samples a worker and step: images, or pieces of 64 bytes.
        seed: Seed of the model's start and of the order of the samples.
        dataset: The images: auto takes Fashion-MNIST where it can be had, else the digits of scikit-learn.
        framework: What trains: torch with DDP, Keras' fit on TensorFlow or JAX, or JAX with optax. In the last three,
            dense averages take DDP's place, and a training's first step counts the compilation.
        device: Where torch computes: cpu, or cuda for GPUs, which workers share if they are more.
        backend: What collectives go through; nccl takes a GPU a worker.
        out: Folder for the pictures and the JSON.
        json: Where the records go, one JSON a line; train.jsonl in the folder if not given.
    """
    from gradwire_bench import origin, pictures, placement, report
    from gradwire_bench import train as bench_train
    from gradwire_bench.cell import Cell
    from gradwire_bench.suite import run
    from gradwire_bench.workloads import WORKLOADS

    console = new_console()
    task = WORKLOADS[workload]
    bench_train.check_framework(framework, task, device)
    placement.check(device, backend, workers)
    racers = bench_train.contenders(method or (), framework)
    link = _possible(console, link)
    source = task.locate(dataset)
    console.print(f"Data: {source.name} ({source.reason}).", markup=False)
    started = time.monotonic()
    setting: dict[str, Any] = {"workers": workers, "link": link, "steps": steps, "batch": batch, "seed": seed}
    ways: dict[str, Any] = {"framework": framework, "device": device, "backend": backend}
    cells = [Cell("train", workload, str(racer), **setting, **ways) for racer in racers]
    rows = _race(console, cells, source)
    where = f"{workers} workers, link {link}, {source.name}, {steps} steps of {workers * batch} {task.samples}"
    console.print(report.train_table(rows, f"Training a {task.what}: {where}"))
    console.print(f"[dim]median step; MB a worker and step; {origin.machine_line()}[/dim]")
    for path in pictures.train_plots(rows, out, where):
        wrote(path)
    keep(json or out / "train.jsonl", run.records(cells, map(run.figures, rows), started))


@bench.command
def periodic(
    section: Annotated[list[Section], Parameter(negative=())] = ["claim", "speedup", "volume", "overhead"],  # noqa: B006
    *,
    workload: Annotated[list[WorkloadName], Parameter(negative=())] = ["image", "language"],  # noqa: B006
    link: str = "100mbit",
    seeds: Positive = 3,
    steps: Annotated[Whole, Parameter(validator=Number(gte=64))] = 960,
    batch: Positive | None = None,
    learning_rate: Annotated[float, Parameter(validator=Number(gt=0))] | None = None,
    shapes: str = "resnet50",
    dataset: Dataset = "auto",
    out: OutputFolder = Path("results/periodic"),
) -> None:
    """Train with local steps and a compressed average now and then, against an fp32 average every step.

    claim: PQASGD at 3 to 5 % of the bytes, 4 and 8 workers. speedup: loss against workers times steps, 1 to 8 workers,
    on the loopback. volume: AdamW with ever fewer bytes, 4 workers, on the loopback. overhead: a step in which nothing
    is sent, the time of an average, and the waiting that a delay hides. Each leaves a JSON, and pictures; the JSON has
    all trainings that have ended, also while others still run.

    ```
    gradwire bench periodic
    gradwire bench periodic claim --workload language --seeds 1 --steps 400
    gradwire bench periodic claim --workload image --steps 15360 --batch 64 --learning-rate 0.4
    gradwire bench periodic overhead --link 1gbit
    ```

    Args:
        section: What to measure; with or without the flag.
        workload: What claim and speedup train; may be repeated. volume trains the last one.
        link: Rate of each worker's link in claim and overhead, such as 100mbit, or none for plain loopback.
        seeds: Trainings of each plan, each with a start and an order of samples of its own.
        steps: Steps of all workers together in a training; volume takes twice as many.
        batch: Samples a worker and step; 16 images or 8 pieces of text if not given.
        learning_rate: At its peak. If not given, SGD in claim and speedup has 0.2 for images and 2 for text, AdamW in
            volume 0.003 and 0.01.
        shapes: Whose shapes the average has that is timed, as of gradwire simulate.
        dataset: The images: auto takes Fashion-MNIST where it can be had, else the digits of scikit-learn.
        out: Folder for the JSON files and the pictures.
    """
    from gradwire_bench.periodic_report import Bench
    from gradwire_bench.workloads import WORKLOADS

    console = new_console()
    bench = Bench(console, _possible(console, link), range(seeds), steps, dataset, batch, out)
    chosen = [WORKLOADS[name] for name in dict.fromkeys(workload)]
    if learning_rate is not None:
        chosen = [replace(each, learning_rate=learning_rate, adam_rate=learning_rate) for each in chosen]
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


def _possible(console: Console, link: str) -> str:
    """The link, or none where no network can be shaped, which is said."""
    from gradwire import lab
    from gradwire_bench.launch import NO_LINK, link_rate

    if link_rate(link) is None or (allowed := lab.availability()).possible:
        return link
    console.print(f"No shaped network here, so this runs on plain loopback: {allowed.reason}", markup=False)
    return NO_LINK


def _race(console: Console, cells: Sequence[Cell], source: DataSource) -> list[TrainRow]:
    """Trains with a live bar for each contender."""
    from gradwire_bench import train as bench_train
    from gradwire_bench.contenders import Contender
    from gradwire_bench.terminal import bars

    with bars(console) as progress:
        tasks = [
            progress.add_task(Contender.parse(cell.contender).label, total=cell.steps, start=False, news="waiting")
            for cell in cells
        ]

        def show(rows: list[TrainRow]) -> None:
            for task, row in zip(tasks, rows, strict=True):
                if row.steps_done and not progress.tasks[task].started:
                    progress.start_task(task)
                if row.accuracy is not None:
                    progress.stop_task(task)
                progress.update(task, completed=row.steps_done, news=_news(row))

        return bench_train.race(cells, source, show)


def _news(row: TrainRow) -> str:
    if row.error:
        return row.error
    if row.loss is None:
        return "waiting"
    accuracy = row.accuracy if row.accuracy is not None else row.curve[-1].accuracy if row.curve else None
    return f"loss {row.loss:.2f}" + ("" if accuracy is None else f", accuracy {accuracy:.1%}")
