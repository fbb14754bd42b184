"""``gradwire frontier``: bits against error of methods, and how far that is from what is possible."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from gradwire.cli.arguments import Dataset, Json, Methods, Natural, OutputPicture, WorkloadName
from gradwire.cli.output import new_console, write, wrote


def frontier(
    method: Methods = None,
    *,
    workload: Annotated[list[WorkloadName], Parameter(negative=())] = ["image", "language"],  # noqa: B006
    steps: Annotated[list[Natural], Parameter(negative=())] = [3, 60, 400],  # noqa: B006
    dataset: Dataset = "auto",
    picture: OutputPicture | None = None,
    json: Json = None,
) -> None:
    """Measure bits against error of one gradient for many methods, and the bounds that they cannot get below.

    Gradients are recorded early, in the middle and late in a dense training, and compressed without a memory, by layer
    and with one segment for the model. The bound is that of coders that know how often each value comes in each layer
    and take values one by one; a coder that sees that large values lie together can get below it.

    ```
    gradwire frontier --picture frontier.png --json frontier.json
    gradwire frontier topk:ratio=0.01 deadzone:bits=0.1 --workload image --steps 60
    ```

    Args:
        method: Methods, name:option=value,...; with or without the flag. Some thirty if not given; deadzone at twelve
            sizes, which others are held against, is always among them.
        workload: Whose gradients: image is the CNN, language the GRU; may be repeated.
        steps: Dense training steps before a recording; may be repeated.
        dataset: The images: auto takes Fashion-MNIST where it can be had, else the digits of scikit-learn.
        picture: Draw bits against error to this file, a .png, .svg or .pdf.
        json: Write all figures to this file too.
    """
    from gradwire_bench import frontier as bench
    from gradwire_bench import frontier_report, origin
    from gradwire_bench.contenders import Contender
    from gradwire_bench.gradients import Recording, real_gradients
    from gradwire_bench.terminal import counted
    from gradwire_bench.workloads import WORKLOADS

    console = new_console()
    chosen = [Contender.parse(each) for each in method] if method else bench.contenders()
    ladder = [each for each in bench.contenders() if each.name == bench.DEADZONE]
    chosen += [each for each in ladder if each not in chosen]
    recordings = []
    with console.status("training") as status:
        for name in dict.fromkeys(workload):
            task = WORKLOADS[name]
            source = task.locate(dataset)
            for count in dict.fromkeys(steps):
                status.update(f"training the {task.what} for {count} steps")
                gradients = real_gradients(source, 1 + bench.WARM_UP_STEPS, count, workload=task)
                recordings.append(Recording.of(f"{task.what}, {count} steps in", gradients))
        found = bench.measure(recordings, chosen, counted(status))
    for each in found:
        console.print(frontier_report.table(each))
    where = f"no memory, payloads as sent; {origin.machine_line()}"
    console.print(f"[dim]{where}[/dim]")
    if picture is not None:
        frontier_report.draw(found, picture, where)
        wrote(picture)
    write(json, origin.document("frontier", steps=list(steps), frontiers=found))
