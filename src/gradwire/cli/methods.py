"""``gradwire methods``: what there is."""

from __future__ import annotations

from pathlib import Path

from gradwire.cli.arguments import Json, Natural
from gradwire.cli.output import new_console, write


def methods(
    *names: str,
    numel: Natural = 1_000_000,
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

    console = new_console()
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
    write(json, report.document("methods", numel=numel, methods=entries, measured=measured))
