"""``gradwire recipes`` and ``gradwire bench recipes``: which line keeps the accuracy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from gradwire.cli.arguments import Json, OutputFile, OutputFolder, Positive, TunedWorkload
from gradwire.cli.bench import bench
from gradwire.cli.output import new_console, write

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

OptimizerName = Literal["sgd", "momentum", "adamw"]


def recipes(
    *,
    workload: Annotated[list[TunedWorkload], Parameter(negative=())] = ["image", "language"],  # noqa: B006
    optimizer: Annotated[list[OptimizerName], Parameter(negative=())] = ["sgd", "momentum", "adamw"],  # noqa: B006
    keeping: Annotated[bool, Parameter(negative=())] = False,
    json: Json = None,
) -> None:
    """Say which lines keep the accuracy, by what this release was measured with.

    Every method was tuned with the same effort; gradwire bench recipes trains anew.

    ```
    gradwire recipes
    gradwire recipes --optimizer adamw --keeping
    ```

    Args:
        workload: image is a CNN, language a GRU; may be repeated.
        optimizer: What takes the averages; momentum is SGD with momentum 0.9; may be repeated.
        keeping: Only lines that keep the accuracy.
        json: Write the rows to this file too.
    """
    from gradwire_bench import cookbook, report
    from gradwire_bench import recipes as measured

    console = new_console()
    rows = [
        row
        for row in measured.rows(measured.load(measured.MEASURED))
        if row.workload in workload and row.optimizer in optimizer and (row.keeps or not keeping)
    ]
    for table in cookbook.tables(rows):
        console.print(table)
    write(json, report.document("recipes", rows=rows))


@bench.command(name="recipes")
def bench_recipes(
    *,
    workload: Annotated[list[TunedWorkload], Parameter(negative=())] = ["image", "language"],  # noqa: B006
    optimizer: Annotated[list[OptimizerName], Parameter(negative=())] = ["sgd", "momentum", "adamw"],  # noqa: B006
    workers: Positive = 4,
    out: OutputFile = Path("results/recipes.json"),
    docs: OutputFolder | None = None,
) -> None:
    """Tune methods and dense averages with the same effort, and say which keep the accuracy.

    All of it takes hours; what has been trained is in the JSON at once, and a run goes on from there.

    ```
    gradwire bench recipes --workload image --optimizer adamw
    gradwire bench recipes --docs docs
    ```

    Args:
        workload: image is a CNN, language a GRU; may be repeated.
        optimizer: What takes the averages; momentum is SGD with momentum 0.9; may be repeated.
        workers: Workers, all in this process.
        out: Where trainings are kept.
        docs: Write the page recipes.md and its picture to this folder.
    """
    from gradwire_bench import cookbook, pictures, report
    from gradwire_bench import recipes as measured
    from gradwire_bench.progress import bars

    console = new_console()
    done = measured.load(out)
    with bars(console) as progress:
        task = progress.add_task("", start=False, news="")
        while wanted := measured.trials(done, workload, optimizer, workers):
            trial = wanted[0]
            what = f"{trial.workload} {trial.optimizer} {trial.method} at {trial.learning_rate:g}, seed {trial.seed}"
            progress.reset(task, description=what, news=f"{len(wanted)} methods to settle")
            step = partial(_show_step, progress, task)
            done.append(measured.train(trial, step))
            report.write_json(out, report.document("bench.recipes", trainings=measured.plain(done)))
    rows = [row for row in measured.rows(done) if row.workload in workload and row.optimizer in optimizer]
    for table in cookbook.tables(rows):
        console.print(table)
    console.print(f"Wrote {out}", soft_wrap=True)
    if docs is not None:
        pictures.recipes_plot(rows, docs / cookbook.PICTURE)
        report.write_text(docs / "recipes.md", cookbook.page(rows, report.machine_line()))
        console.print(f"Wrote {docs / 'recipes.md'}", soft_wrap=True)


def _show_step(progress: Progress, task: TaskID, step: int, steps: int) -> None:
    progress.update(task, completed=step, total=steps)
