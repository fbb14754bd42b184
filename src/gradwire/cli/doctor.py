"""``gradwire doctor``: what this machine can do."""

from __future__ import annotations

import os
from pathlib import Path

from rich.text import Text

from gradwire.cli.arguments import Json
from gradwire.cli.output import new_console, write
from gradwire.errors import GradwireError


def doctor(*, json: Json = None) -> None:
    """Say what this machine has and lacks for gradwire, and what to do about it.

    Under torchrun it measures the links between all pairs of workers instead, and says what is odd about them.

    ```
    gradwire doctor
    torchrun --nproc-per-node 4 -m gradwire doctor
    ```

    Args:
        json: Write the findings to this file too.
    """
    from gradwire.cli import diagnosis
    from gradwire_bench import origin
    from gradwire_bench.terminal import table

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _group(json)
        return
    findings = diagnosis.examine()
    colours = {"ok": "green", "limited": "yellow", "broken": "red"}
    shown = table("This machine", "", "state", "found", "what to do", words=4)
    for finding in findings:
        shown.add_row(
            finding.subject,
            Text(finding.state, style=colours[finding.state]),
            Text(finding.found),
            Text(finding.remedy),
        )
    new_console().print(shown)
    write(json, origin.document("doctor", findings=findings))
    if any(finding.state == "broken" for finding in findings):
        raise GradwireError("gradwire cannot work here; see what is broken above")


def _group(json: Path | None) -> None:
    """The links of the group that this process was started in; rank 0 says what was found."""
    import torch.distributed as dist

    from gradwire.cost import group, pairs
    from gradwire_bench import origin

    rank, workers, device = group.join()
    try:
        whole = dist.group.WORLD
        found = [] if whole is None else pairs.measured(whole, device)
    finally:
        dist.destroy_process_group()
    if rank:
        return
    console = new_console()
    for sentence in (said := pairs.sentences(found)):
        console.print(sentence, soft_wrap=True)
    write(json, origin.document("doctor.group", workers=workers, pairs=found, said=said))
