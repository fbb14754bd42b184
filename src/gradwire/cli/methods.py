"""``gradwire methods``: what there is."""

from __future__ import annotations

from pathlib import Path

from gradwire.cli.arguments import Flag, Json, OutputFolder, Values
from gradwire.cli.output import new_console, write, wrote


def methods(
    *names: str,
    measure: Flag = False,
    numel: Values = 1_000_000,
    docs: OutputFolder | None = None,
    accuracy: Path | None = None,
    json: Json = None,
) -> None:
    """List the compression methods, or say all of some: options, law, bound, sizes, routes, memories, source.

    The list has a line a method, by family: its class, the bits that it writes for a value of a 1000x1000 matrix, its
    source, and what it does.

    ```
    gradwire methods
    gradwire methods topk
    gradwire methods --measure
    gradwire methods topk dgc --measure --numel 25000000
    gradwire methods --json methods.json
    gradwire methods --numel 25000000 --docs docs --accuracy results/train.jsonl
    ```

    Args:
        names: Only these, and all of each; a list of all of them if none is given.
        measure: Measure size and speed on this machine; a minute or two for all methods.
        numel: Elements of the gradient that is measured, in one matrix; 0 to measure nothing.
        docs: Write the page methods.md and its picture to this folder, measured unless numel is 0.
        accuracy: Training results of gradwire bench train, whose accuracies the page is to show.
        json: Write what is known, and what was measured, to this file too.
    """
    from gradwire_bench import catalogue, data, handbook, origin, pictures
    from gradwire_bench.gradients import Recording, real_gradients
    from gradwire_bench.suite.ledger import Ledger
    from gradwire_bench.suite.measures import gains
    from gradwire_bench.terminal import counted

    console = new_console()
    entries = catalogue.entries(names)
    accuracies = {} if accuracy is None else gains(Ledger.read(accuracy).records())
    measured: list[catalogue.Measurement] = []
    source = data.locate("auto") if docs is not None and numel else None
    if numel and (measure or docs is not None):
        with console.status("measuring") as status:
            real = None if source is None else Recording.of(source.name, real_gradients(source, catalogue.WORKERS))
            measured = catalogue.measure(
                [entry.name for entry in entries if not entry.needs],
                numel,
                real,
                counted(status),
            )
    if measured or not names:
        console.print(handbook.overview(entries, measured, console.width))
    else:
        console.print(*map(handbook.description, entries), sep="\n\n")
    if measured:
        console.print(f"[dim]one thread, {numel / 1e6:g} M values, 4 workers; {origin.machine_line()}[/dim]")
    if docs is not None:
        where = f"{numel / 1e6:g} M values for the speeds; {origin.machine_line()}"
        if source is not None:
            about = f"{source.name}, gradients of a CNN after 30 steps, {catalogue.WORKERS} workers"
            pictures.size_error_plot(entries, measured, docs / handbook.PICTURE, about)
        origin.write_text(docs / "methods.md", handbook.page(entries, measured, where, accuracies))
        wrote(docs / "methods.md")
    if not (measured or names):
        console.print(
            "\n[dim]gradwire methods NAME says all of one; --measure has sizes and speeds of this machine[/dim]"
        )
    write(json, origin.document("methods", numel=numel, methods=entries, measured=measured))
