"""``gradwire bench kernels | codecs | gpu``: measurements without a network."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from gradwire.cli.arguments import (
    Dataset,
    Flag,
    Json,
    Methods,
    Natural,
    OutputFolder,
    OutputPicture,
    Positive,
    Segments,
    Whole,
    WorkloadName,
)
from gradwire.cli.output import keep, new_console


def kernels(
    *,
    numel: Annotated[Whole, Parameter(validator=Number(gte=1, lte=10**9))] = 25_000_000,
    repeats: Positive = 7,
    segments: Segments = "one",
    threads: Positive = 1,
    json: Json = None,
) -> None:
    """Time the inner loops on one thread, as multiples of a copy of the same tensor, and on several.

    ```
    gradwire bench kernels --json kernels.jsonl
    gradwire bench kernels --threads 8 --segments resnet
    ```

    Args:
        numel: Elements of the gradient.
        repeats: Rounds; the median of them counts.
        segments: one segment of all elements, or the layers of ResNet-50.
        threads: Also with so many threads, and how many times as fast that is.
        json: Write all measurements to this file too.
    """
    from gradwire_bench import kernels as bench_kernels
    from gradwire_bench import origin, report
    from gradwire_bench.cell import Cell
    from gradwire_bench.suite import run
    from gradwire_bench.terminal import counted

    console = new_console()
    started = time.monotonic()
    with console.status("compiling") as status:
        rows = bench_kernels.measure(numel, repeats, segments, counted(status), threads)
    console.print(
        report.kernels_table(rows, f"Inner loops, {numel / 1e6:g} M values, one thread, segments: {segments}", threads)
    )
    console.print(f"[dim]median of {repeats} rounds; {origin.machine_line()}[/dim]")
    cells = [Cell("kernel", f"{segments}:{numel}", row.operation, workers=1, steps=repeats) for row in rows]
    keep(json, run.records(cells, [(asdict(row), None) for row in rows], started))


def codecs(
    method: Methods = None,
    *,
    workload: Annotated[list[WorkloadName], Parameter(negative=())] = ["image", "lstm"],  # noqa: B006
    steps: Annotated[list[Natural], Parameter(negative=())] = [3, 60, 400],  # noqa: B006
    granularity: Annotated[list[Literal["layer", "model"]], Parameter(negative=())] = ["layer"],  # noqa: B006
    seed: Whole = 0,
    dataset: Dataset = "auto",
    json: Json = None,
) -> None:
    """Size and error of codecs on gradients recorded early, in the middle and late in real trainings.

    gradwire frontier holds the same figures against what no coder of single values gets below.

    ```
    gradwire bench codecs
    gradwire bench codecs topk:ratio=0.01 qsgd:bits=4 --workload unet --steps 200 --json codecs.jsonl
    ```

    Args:
        method: Methods, name:option=value,...; with or without the flag. Those of the small suite if not given.
        workload: Whose gradients; may be repeated.
        steps: Dense training steps before a recording; may be repeated.
        granularity: layer, or model for one segment of all; may be repeated.
        seed: Of the training, and of what is random in a method.
        dataset: The images: auto takes Fashion-MNIST where it can be had, else the digits of scikit-learn.
        json: Write all measurements to this file too, one JSON a line.
    """
    from gradwire_bench import origin
    from gradwire_bench.cell import Cell, Record
    from gradwire_bench.suite.plan import load
    from gradwire_bench.suite.run import measure
    from gradwire_bench.suite.tables import tables

    console = new_console()
    known = [cell.method for cell in load("presets", "small").cells if cell.kind == "codec"]
    cells = [
        Cell("codec", each, name, scope, steps=count, seed=seed)
        for each in dict.fromkeys(workload)
        for count in dict.fromkeys(steps)
        for name in dict.fromkeys(method or known)
        for scope in dict.fromkeys(granularity)
    ]
    records: list[Record] = []
    with console.status("training") as status:
        for cell in cells:
            status.update(f"{len(records)} of {len(cells)}  {cell.workload}, {cell.steps} steps in: {cell.contender}")
            result, seconds, error = measure(cell, dataset)
            records.append(Record.now(cell, result, seconds, origin.command(), error))
    for table in tables(records):
        console.print(table.shown())
    console.print(f"[dim]no memory, payloads as sent; {origin.machine_line()}[/dim]")
    keep(json, records)


def gpu(
    *,
    json: Json = None,
    plot: OutputPicture | None = None,
    docs: OutputFolder | None = None,
    rehearse: Flag = False,
) -> None:
    """All that a GPU is needed for, in less than eight minutes: bits, speeds, waits, memory, overhead of a step.

    Bits of every kernel are held against those on the CPU; speeds at 1, 25 and 125 M values against the bandwidth of a
    copy; a step of each method must not wait for the device; DDP trains ResNet-50 and GPT-2 124M at world size 1 over
    NCCL, with each method and without; two ranks share the GPU where NCCL lets them. Each part is a process of its own,
    and every record is on disk at once. Without a GPU it says so, and ends with 2.

    ```
    gradwire bench gpu --json gpu.jsonl --plot gpu.png
    gradwire bench gpu --rehearse
    ```

    Args:
        json: Write all measurements to this file, one JSON a line, each as it comes.
        plot: Draw speeds, and what ran beside backward, to this file.
        docs: Write the tables in this folder's gpus.md and benchmarks.md; without a GPU from what was measured before,
            or from estimates.
        rehearse: Run everything small on the CPU, to see that it runs; its figures mean nothing.
    """
    from gradwire_bench import gpu as bench_gpu

    bench_gpu.run(json, plot, docs, rehearse)
