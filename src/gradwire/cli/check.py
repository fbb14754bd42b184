"""``gradwire check``: whether methods keep the laws."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from gradwire.cli.arguments import Json
from gradwire.cli.output import new_console, write
from gradwire.errors import GradwireError


def check(
    method: Annotated[list[str], Parameter(negative=())],
    *,
    json: Json = None,
) -> None:
    """Hold the laws of the house against methods, above all your own: a line a law, and what was found where it breaks.

    All of it happens in this process, on noise, in seconds. A law that a method does not declare has a dash.

    ```
    gradwire check topk:ratio=0.01
    gradwire check mine:rank=2 --import mine.py
    gradwire check qsgd:bits=4,route=gather,memory=none --json laws.json
    ```

    Args:
        method: Methods, name:option=value,...; with or without the flag.
        json: Write all findings to this file too.
    """
    from gradwire import local
    from gradwire_bench import origin

    console = new_console()
    colours = {True: "green", False: "bold red", None: "dim"}
    found: dict[str, list[dict[str, object]]] = {}
    broken = 0
    for each in method:
        with console.status(f"checking {each}"):
            result = local.check(each)
        head, *lines = str(result).splitlines()
        console.print(Text(head, style="bold"))
        for finding, line in zip(result.findings, lines, strict=True):
            console.print(Text(line, style=colours[finding.holds]))
        found[each] = [dataclasses.asdict(finding) for finding in result.findings]
        broken += sum(finding.holds is False for finding in result.findings)
    write(json, origin.document("check", methods=found))
    if broken:
        raise GradwireError(f"{broken} law{'s are' if broken > 1 else ' is'} broken; the lines above say how")
