"""``gradwire recipes`` and ``gradwire bench recipes``: which line keeps the accuracy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, get_args

from cyclopts import Parameter

from gradwire.cli.arguments import Flag, Jobs, Json, Methods, OutputFile, OutputFolder, Positive, TunedWorkload
from gradwire.cli.bench import bench
from gradwire.cli.output import new_console, write, wrote
from gradwire.errors import ConfigurationError, GradwireError, did_you_mean

OptimizerName = Literal["sgd", "momentum", "adamw", "muon"]

ALL_OPTIMIZERS: list[OptimizerName] = list(get_args(OptimizerName))
ALL_WORKLOADS: list[TunedWorkload] = list(get_args(TunedWorkload))


def recipes(
    *,
    workload: Annotated[list[TunedWorkload], Parameter(negative=())] = ALL_WORKLOADS,
    optimizer: Annotated[list[OptimizerName], Parameter(negative=())] = ALL_OPTIMIZERS,
    keeping: Flag = False,
    json: Json = None,
) -> None:
    """Say which lines keep the accuracy, by what this release was measured with.

    Every method was tuned with the same effort; gradwire bench recipes trains anew.

    ```
    gradwire recipes
    gradwire recipes --optimizer adamw --keeping
    ```

    Args:
        workload: image is a CNN with batch norm, alexnet one without, resnet20 a residual one; gpt is a small
            transformer, language a GRU; may be repeated.
        optimizer: What takes the averages; momentum is SGD with momentum 0.9, muon is Muon for hidden matrices
            beside AdamW; may be repeated.
        keeping: Only lines that keep the accuracy.
        json: Write the rows to this file too.
    """
    from gradwire_bench import cookbook, origin
    from gradwire_bench import recipes as measured

    console = new_console()
    rows = [
        row
        for row in measured.rows(measured.load(measured.MEASURED))
        if row.workload in workload and row.optimizer in optimizer and (row.keeps or not keeping)
    ]
    if not (tables := list(cookbook.tables(rows))):
        raise GradwireError(
            f"nothing was trained with workload {' or '.join(workload)} and optimizer {' or '.join(optimizer)}; "
            "gradwire recipes shows what was, gradwire bench recipes trains more"
        )
    for table in tables:
        console.print(table)
    write(json, origin.document("recipes", rows=rows))


@bench.command(name="recipes")
def bench_recipes(
    method: Methods = None,
    *,
    workload: Annotated[list[TunedWorkload], Parameter(negative=())] = ALL_WORKLOADS,
    optimizer: Annotated[list[OptimizerName], Parameter(negative=())] = ALL_OPTIMIZERS,
    workers: Positive = 4,
    jobs: Jobs = None,
    out: OutputFile = Path("results/recipes.json"),
    docs: OutputFolder | None = None,
) -> None:
    """Tune methods and dense averages with the same effort, and say which keep the accuracy.

    All of it takes hours; what has been trained is in the JSON at once, and a run goes on from there.

    ```
    gradwire bench recipes --workload image --optimizer adamw
    gradwire bench recipes deadzone:bits=0.1 powersgd:rank=4 --workload gpt
    gradwire bench recipes --docs docs
    ```

    Args:
        method: Lines to train; all that are known to this command if not given.
        workload: image is a CNN with batch norm, alexnet one without, resnet20 a residual one; gpt is a small
            transformer, language a GRU; may be repeated.
        optimizer: What takes the averages; momentum is SGD with momentum 0.9, muon is Muon for hidden matrices
            beside AdamW; may be repeated.
        workers: Workers of a training, all in one process.
        jobs: Trainings that run side by side; as many as there are cores if not given.
        out: Where trainings are kept.
        docs: Write the page recipes.md and its picture, of all that was ever settled, to this folder.
    """
    from gradwire_bench import cookbook, origin, pictures
    from gradwire_bench import recipes as measured
    from gradwire_bench.abreast import abreast
    from gradwire_bench.terminal import bars
    from gradwire_bench.trial import STEPS

    console = new_console()
    known = [each.method for each in measured.CANDIDATES]
    for each in method or ():
        if each not in known:
            raise ConfigurationError(
                f"no recipe is tried for {each!r}; {did_you_mean(each, known)}they are {', '.join(known)}"
            )
    done = measured.load(out)
    with bars(console) as progress, abreast(measured.train, jobs or os.cpu_count() or 1) as train:
        task = progress.add_task("", news="")
        while wanted := measured.trials(done, workload, optimizer, workers, method):
            progress.reset(task, total=len(wanted), description=f"{len(wanted)} methods to settle")
            for trial, future in train(wanted):
                done.append(future.result())
                origin.write_json(out, origin.document("bench.recipes", steps=STEPS, trainings=measured.plain(done)))
                what = (
                    f"{trial.workload} {trial.optimizer} {trial.method} at {trial.learning_rate:g}, seed {trial.seed}"
                )
                progress.update(task, advance=1, news=what)
    rows = [row for row in measured.rows(done) if row.workload in workload and row.optimizer in optimizer]
    for table in cookbook.tables(rows):
        console.print(table)
    wrote(out)
    if docs is not None:
        settled = [row for row in measured.rows(done) if row.seeds >= measured.SEEDS]
        pictures.recipes_plot(settled, docs / cookbook.PICTURE)
        origin.write_text(docs / "recipes.md", cookbook.page(settled, origin.machine_line()))
        wrote(docs / "recipes.md")
