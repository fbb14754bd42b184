"""``gradwire doctor``: what this machine can do."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from gradwire.cli.arguments import Json
from gradwire.cli.output import new_console, write
from gradwire.errors import GradwireError


def doctor(*, json: Json = None) -> None:
    """Say what this machine has and lacks for gradwire, and what to do about it.

    ```
    gradwire doctor
    ```

    Args:
        json: Write the findings to this file too.
    """
    from gradwire.cli import diagnosis
    from gradwire_bench import report

    findings = diagnosis.examine()
    colours = {"ok": "green", "limited": "yellow", "broken": "red"}
    table = Table(title="This machine", title_justify="left", title_style="bold")
    for column in ("", "state", "found", "what to do"):
        table.add_column(column)
    for finding in findings:
        table.add_row(
            finding.subject,
            Text(finding.state, style=colours[finding.state]),
            Text(finding.found),
            Text(finding.remedy),
        )
    new_console().print(table)
    write(json, report.document("doctor", findings=findings))
    if any(finding.state == "broken" for finding in findings):
        raise GradwireError("gradwire cannot work here; see what is broken above")
