"""``gradwire lab``: a command on every worker of a network with the rates that are asked for."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from gradwire.cli.arguments import Json, Positive
from gradwire.cli.output import new_console, write
from gradwire.errors import ConfigurationError, did_you_mean

OPTIONS = ("--workers", "--within", "--sites", "--between", "--json")


def lab(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    workers: Positive = 4,
    within: str = "1gbit",
    sites: Positive = 1,
    between: str | None = None,
    json: Json = None,
) -> None:
    """Run a command once a worker, each as if it were a machine, on a network of given rates; count what they send.

    Workers get what torchrun would set: RANK, WORLD_SIZE, MASTER_ADDR and so on. Every worker has an interface of its
    own; with --sites, workers that are neighbours in rank are at one place, and what goes to others shares its one
    link. It needs Linux, and root or user namespaces. Ctrl-C ends all of it.

    ```
    gradwire lab --sites 2 --between 100mbit --within 1gbit -- python examples/diloco.py --sites 2 --every 8
    gradwire lab --workers 2 --within 100mbit -- python train.py --epochs 1
    ```

    Args:
        command: What each worker runs, after --.
        workers: Number of workers.
        within: Rate of each worker's link, in each direction.
        sites: Number of places, with as many workers each.
        between: Rate of each place's link to the others, in each direction; to be given with --sites.
        json: Write what was counted to this file too.
    """
    from gradwire.lab import Lab, parse_rate
    from gradwire_bench import origin
    from gradwire_bench.terminal import table

    if not command:
        raise ConfigurationError("there is no command to run; write one after --, as in gradwire lab -- ls")
    if command[0].startswith("-"):
        raise ConfigurationError(
            f"{command[0]!r} is no option of gradwire lab; {did_you_mean(command[0], OPTIONS)}"
            f"choose {', '.join(OPTIONS)}, and write the command after --, as in gradwire lab -- ls"
        )
    parse_rate(within, "within")
    console = new_console()
    with Lab(workers, within, sites=sites, between=between) as network:
        result = network.run(
            command,
            on_line=lambda rank, line: console.print(Text(f"{rank} | {line}"), soft_wrap=True),
            on_error_line=lambda rank, line: print(f"{rank} | {line}", file=sys.stderr, flush=True),
        )
        counted = [(f"worker {rank}", within, each) for rank, each in enumerate(network.counters())]
        counted += [
            (f"site {site}, to others", between or "", each) for site, each in enumerate(network.site_counters())
        ]
    shown = table(f"{workers} workers, {result.seconds:.1f} s", "link", "rate", "MB sent", "MB received")
    for name, rate, each in counted:
        shown.add_row(name, rate, f"{each.tx_bytes / 1e6:,.2f}", f"{each.rx_bytes / 1e6:,.2f}")
    console.print(shown)
    console.print("[dim]as the kernel counts on each interface, headers included[/dim]")
    links = [{"name": name, "rate": rate, "counters": each} for name, rate, each in counted]
    write(json, origin.document("lab", seconds=result.seconds, links=links))
