"""``gradwire analyze``: what methods do to gradients."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from gradwire.cli.arguments import Dataset, Json, Natural, Positive
from gradwire.cli.output import new_console, write


def analyze(
    method: Annotated[list[str], Parameter(negative=())] = ["topk:ratio=0.01", "qsgd:bits=4", "terngrad"],  # noqa: B006
    *,
    owner: str | None = None,
    steps: Natural = 30,
    draws: Positive = 16,
    dataset: Dataset = "auto",
    json: Json = None,
) -> None:
    """Measure what methods do to a CNN's real gradients, layer by layer, beside what theory says of it.

    Omega is how much longer the operator makes a gradient, E|Q(g)|²/|g|² - 1: positive for unbiased methods, negative
    for those that drop something. The layer-wise bound is the sum over layers of (1 + Omega_M)(1 + Omega_W), the
    entire-model bound the number of layers times the largest (Dutta et al. 2020, arXiv:1911.08250).

    ```
    gradwire analyze topk
    gradwire analyze topk:ratio=0.001 terngrad
    gradwire analyze topk:ratio=0.01 --owner qsgd:8 --json analysis.json
    ```

    Args:
        method: Methods, name:option=value,...; with or without the flag.
        owner: What the average is compressed with again, such as qsgd:8.
        steps: Dense training steps before the gradients are taken.
        draws: Steps of randomness to average over.
        dataset: auto takes Fashion-MNIST where it can be had, else the digits of scikit-learn.
        json: Write all figures to this file too.
    """
    from gradwire import methods as catalogue
    from gradwire.codecs import quantize
    from gradwire.local import analysis
    from gradwire_bench import data, origin, report
    from gradwire_bench.contenders import Contender
    from gradwire_bench.gradients import real_gradients

    console = new_console()
    parsed = [Contender.parse(each) for each in method]
    chosen = {each.label: catalogue.make(each.name, dict(each.options)) for each in parsed}
    again = None if owner is None else quantize.parse(owner)
    source = data.locate(dataset)
    found = {}
    with console.status("training") as status:
        (gradients,) = real_gradients(source, 1, steps)
        large = {name: each for name, each in gradients.items() if each.dim() > 1}
        for label, each in chosen.items():
            status.update(f"analyzing {label}")
            found[label] = analysis.analyze(large, each, owner=again, draws=draws)
    for label, result in found.items():
        console.print(report.analysis_table(label, result))
    console.print(f"[dim]gradients of a CNN on {source.name} after {steps} steps; {origin.machine_line()}[/dim]")
    write(json, origin.document("analyze", dataset=source.name, steps=steps, draws=draws, analyses=found))
