"""``gradwire recipes``: which line keeps the accuracy."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from gradwire.cli.arguments import Json, WorkloadName
from gradwire.cli.output import new_console, write

OptimizerName = Literal["sgd", "momentum", "adamw"]


def recipes(
    *,
    workload: Annotated[list[WorkloadName], Parameter(negative=())] = ["image", "language"],  # noqa: B006
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
    from gradwire_bench import recipes as bench_recipes

    console = new_console()
    rows = [
        row
        for row in bench_recipes.rows(bench_recipes.load(bench_recipes.MEASURED))
        if row.workload in workload and row.optimizer in optimizer and (row.keeps or not keeping)
    ]
    for table in cookbook.tables(rows):
        console.print(table)
    write(json, report.document("recipes", rows=rows))
