"""The catalogue as a table for the terminal and as a page of the documentation, from the same data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from gradwire.bench.catalogue import SECONDS, SPARSE, TIMED_STEPS, WARM_UP_STEPS, WORKERS, Entry, Measurement

PICTURE = Path("images") / "methods_size_error.png"
"""Of size against error, beside the page."""

_ALL = {"layer", "bucket", "model", "block"}

_SPARSE = ", ".join(f"`{name}`" for name in SPARSE)

_INTRODUCTION = f"""# Methods

Every method is a recipe over the same parts and takes any memory, route and granularity that its mathematics allows.
`gradwire methods --docs docs` writes this page from what the classes declare, and measures.

* **class**: *unbiased*, the average is right in expectation; *contractive*, the error is smaller than the gradient, so
  error feedback makes up for it; *exact*, up to rounding; *biased*, none of these. Tests hold each method to it.
* **bits as declared**: what a segment of `d` elements (or a matrix of `n` by `m`) takes there and back on the usual
  route: what a worker writes in all rounds, and on the sharded route what owners write of the average; with
  `k = max(1, round(ratio * d))`. A worker sends (n - 1) / n of it on the sharded route, 2 (n - 1) / n of what it
  all-reduces, and n - 1 times what is gathered. Tests hold each method to it.
* **bits**: what one of {WORKERS} workers was seen to write for an element, its own share of the average, alignment and
  tables included.
* **encode**, **decode**: gigabytes of float32 gradient a second on one thread, from the gradient to the first payload,
  error feedback included, and from the first answer to the average of {WORKERS} workers, with what is compressed again.
  The gradient is normal noise, other noise in each step; {_SPARSE} are timed at
  thresholds at which they send about 1 % of it. It is the median of {TIMED_STEPS} steps after {WARM_UP_STEPS} to warm
  up, or of fewer, since no step begins later than {SECONDS:g} s after the first of its kind.
* **error**: `|average - mean|² / |mean|²` of one step of {WORKERS} workers on real gradients, without a memory.
* **accuracy**: of the image workload, against plain DDP in the same run, in percentage points; only where it was run.
"""


_PUBLISHED = """## As published

`gradwire.compress(model, "terngrad", preset="paper")` takes what a method's publication has where the defaults are
others; what is given beside it still counts. An empty cell means that the defaults are the publication's as far as we
know it; where its text was not at hand, the method's docstring says so. The last column says why a default differs,
and what of the publication is here in another form or not at all.
"""


def table(entries: Sequence[Entry], measured: Sequence[Measurement], title: str) -> Table:
    """The catalogue for the terminal; without measurements if there are none."""
    shown = Table(title=title, title_justify="left", title_style="bold")
    for column in ("name", "class", "routes", "granularities"):
        shown.add_column(column)
    for column in ("bits", "encode GB/s", "decode GB/s") if measured else ():
        shown.add_column(column, justify="right")
    shown.add_column("source")
    numbers = {each.name: each for each in measured}
    for entry in entries:
        seen = numbers.get(entry.name)
        figures = [] if seen is None else [f"{seen.bits:.3g}", f"{seen.encode_gbps:.2f}", f"{seen.decode_gbps:.2f}"]
        name = "\n".join([entry.name, *(f"  {option}={value}" for option, value in entry.options.items())])
        ways = ", ".join(entry.routes)
        shown.add_row(name, entry.bias, ways, _granularities(entry), *figures, entry.citation)
    return shown


def page(
    entries: Sequence[Entry],
    measured: Sequence[Measurement],
    where: str,
    accuracies: Mapping[str, float],
) -> str:
    """The page in Markdown.

    Args:
        entries: What the methods say of themselves.
        measured: What they were seen to do.
        where: When, on what machine and how it was measured, in a line.
        accuracies: Percentage points above plain DDP, by contender as on the command line.
    """
    lines = [_INTRODUCTION, "| method | class | bits as declared | routes | granularities | memory | source |"]
    lines.append("|---|---|---|---|---|---|---|")
    for entry in entries:
        cells = (
            f"`{entry.name}`<br>{entry.summary}",
            entry.bias,
            f"`{entry.wire_bits}`",
            ", ".join(entry.routes),
            _granularities(entry),
            entry.memory,
            entry.citation,
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Options and their defaults:", ""]
    lines += [f"* `{entry.name}`: {_options(entry)}" for entry in entries if entry.options]
    lines += ["", _PUBLISHED, "| method | published | default | why, and what else is otherwise |", "|---|---|---|---|"]
    for entry in entries:
        lines.append(f"| `{entry.name}` | {_settings(entry, 0)} | {_settings(entry, 1)} | {entry.note} |")
    lines += ["", "## Measured", "", f"{where}.", "", f"![size against error]({PICTURE.as_posix()})", ""]
    lines += ["| method | bits | encode GB/s | decode GB/s | error | accuracy |", "|---|---|---|---|---|---|"]
    usual = {contender: gain for contender, gain in accuracies.items() if "memory=none" not in contender}
    for each in measured:
        gain = ", ".join(_gain(run, usual[run], each.name) for run in usual if run.partition(":")[0] == each.name)
        error = "" if each.error is None else f"{each.error:.2g}"
        speeds = f"{each.encode_gbps:.2f} | {each.decode_gbps:.2f}"
        lines.append(f"| `{each.name}` | {each.bits:.3g} | {speeds} | {error} | {gain} |")
    without = [f"`{run}` {gain:+.1f}" for run, gain in accuracies.items() if run not in usual]
    if without:
        lines += ["", f"Without the memory that the paper gives them: {', '.join(without)}."]
    return "\n".join(lines) + "\n"


def _gain(contender: str, gain: float, name: str) -> str:
    """The gain, and the settings where they are not the defaults."""
    settings = contender.removeprefix(name).removeprefix(":")
    return f"{gain:+.1f} ({settings})" if settings else f"{gain:+.1f}"


def _settings(entry: Entry, which: int) -> str:
    return ", ".join(f"`{setting}={values[which]}`" for setting, values in entry.published.items())


def _granularities(entry: Entry) -> str:
    return "all" if set(entry.granularities) == _ALL else ", ".join(entry.granularities)


def _options(entry: Entry) -> str:
    return ", ".join(f"`{option}={value!r}`" for option, value in entry.options.items())
