"""The catalogue for the terminal and as a page of the documentation, from the same data."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

import gradwire
from gradwire_bench.catalogue import (
    SECONDS,
    SIDE,
    SPARSE,
    TIMED_STEPS,
    WARM_UP_STEPS,
    WORKERS,
    Entry,
    Measurement,
)

PICTURE = Path("images") / "methods_size_error.png"
"""Of size against error, beside the page."""

LEAST_WIDTH_OF_SOURCES = 90
"""Columns from which on a line has room for a method's source."""

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
  thresholds at which they send about 1 % of it, `gradiveq` and `greedylore` after the step in which they learn. It is
  the median of {TIMED_STEPS} steps after {WARM_UP_STEPS} to warm up, or of fewer, since none begins later than
  {SECONDS:g} s after the first that is timed; where the warm-up takes longer, its last step counts.
* **error**: `|average - mean|² / |mean|²` of one step of {WORKERS} workers on real gradients, without a memory.
* **accuracy**: of the image workload, against plain DDP in the same run, in percentage points; only where it was run.
"""


_PUBLISHED = """## As published

`gradwire.compress(model, "terngrad", preset="paper")` takes what a method's publication has where the defaults are
others; what is given beside it still counts. An empty cell means that the defaults are the publication's as far as we
know it; where its text was not at hand, the method's docstring says so. The last column says why a default differs,
and what of the publication is here in another form or not at all. With either, small tensors and vectors are averaged
densely unless `dense=` says otherwise; in their code the authors of DGC, PowerSGD and ACP-SGD leave vectors alone,
those of TernGrad compress all, or all above a size, and may leave out the last layer. On the sharded route every
parameter is cut into a share for each worker: where a paper has one scale for a layer, or one top-k, each of its shares
has one here, on both ways.
"""


_OTHER_NAMES = """## Published under other names

Some publications are choices of methods above, on their gradients; those of local steps are in
[periodic.md](periodic.md#recipes).

| publication | line | source |
|---|---|---|
"""

OTHER_NAMES = (
    ("Mem-SGD", "topk:ratio=0.001", "Stich et al. 2018, arXiv:1809.07599; with `learning_rate=`"),
    ("DIANA", "qsgd:bits=4,route=gather,memory=diana", "Mishchenko et al. 2019, arXiv:1901.09269"),
    ("DoubleSqueeze", "topk:ratio=0.01,route=sharded", "Tang et al. 2019, arXiv:1905.05957; or any contractive method"),
    (
        "STC",
        "topk:ratio=0.01,values=sign,indices=entropy,route=sharded",
        "Sattler et al. 2019, arXiv:1903.02891; distances by another code than Golomb's",
    ),
    ("DRIVE", "eden:bits=1", "Vargaftik et al. 2021, arXiv:2105.08339"),
    ("EF21-BC", "ef21:ratio=0.01,route=sharded", "Fatkhullin et al. 2021, arXiv:2110.03294"),
)
"""Publications without a method of their own: name, line, source."""


def overview(entries: Sequence[Entry], measured: Sequence[Measurement], width: int) -> Text:
    """The catalogue for the terminal: a line a method, family by family.

    Args:
        entries: What the methods say of themselves.
        measured: What they were seen to do, or nothing.
        width: Columns of the terminal; what is too long for its line ends in an ellipsis.
    """
    seen = {each.name: each for each in measured}
    names = 2 + max(len(entry.name) for entry in entries)
    sources = 2 + max(len(_short_source(entry)) for entry in entries) if width >= LEAST_WIDTH_OF_SOURCES else 0
    figures = ["bits", *(["enc GB/s", "dec GB/s"] if measured else [])]
    room = max(width - 2 - names - 13 - 10 * len(figures) - sources, 0)
    numbers = "".join(f"{each:>8}  " for each in figures)
    head = f"{'':{names + 2}}{'class':13}{numbers}{'source'[:sources]:{sources}}what it does"
    shown = Text(overflow="crop", no_wrap=True).append(f"{head[:width]}\n", "bold")
    for family, members in itertools.groupby(entries, key=lambda entry: entry.family):
        shown.append(f"{family}\n", "bold cyan")
        for entry in members:
            figures = ["" if entry.bits is None else f"{entry.bits:.3g}"]
            if each := seen.get(entry.name):
                figures = [f"{each.bits:.3g}", f"{each.encode_gbps:.2f}", f"{each.decode_gbps:.2f}"]
            tail = f"{_short_source(entry)[:sources]:{sources}}{_clipped(entry.summary, room)}"
            line = f"{entry.bias:13}{''.join(f'{each:>8}  ' for each in figures)}{tail}"
            shown.append(f"  {entry.name:{names}}", "bold").append(line[: width - 2 - names].rstrip() + "\n")
    shown.rstrip()
    return shown


def description(entry: Entry) -> Table:
    """One method in full, for the terminal."""
    laws = {
        "unbiased": "unbiased: E Q(x) = x",
        "contractive": "contractive: E |x - Q(x)|² < |x|², so error feedback makes up for what it leaves",
        "exact": "exact, up to rounding",
        "biased": "biased: neither E Q(x) = x nor a contraction",
    }
    values = f"for {SIDE * SIDE:,} values"
    bound = "none" if entry.bound is None else f"E |Q(x) - x|² <= {entry.bound:.4g} |x|² {values} without a memory"
    facts = {
        "family": entry.family,
        "law": laws.get(entry.bias, f"bias={entry.bias!r}, which is none of {', '.join(laws)}"),
        "bound": bound,
        "bits": _bits(entry),
        "sizes": sizes(entry) if entry.wire_bits and not entry.needs else "",
        "routes": ", ".join(entry.routes),
        "granularity": ", ".join(entry.granularities),
        "memory": f"{entry.memory}; it can carry {', '.join(entry.memories)}",
        "source": entry.citation,
    }
    shown = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    shown.add_column(style="bold")
    shown.add_column()
    shown.add_row(Text(entry.name), Text(entry.summary, style="bold"))
    for paragraph in filter(None, entry.about.split("\n\n")):
        shown.add_row("", "")
        shown.add_row("", Text(" ".join(paragraph.split())))
    shown.add_row("", "")
    told = {option: f"no default: give it; {entry.option_texts.get(option, '')}".rstrip("; ") for option in entry.needs}
    told |= {f"{option}={default!r}": entry.option_texts.get(option, "") for option, default in entry.options.items()}
    for option, text in told.items():
        shown.add_row(Text(option), Text(text))
    if told:
        shown.add_row("", "")
    for fact, said in facts.items():
        shown.add_row(fact, Text(said))
    return shown


def _bits(entry: Entry) -> str:
    if not entry.wire_bits:
        return "none declared"
    where_k = ", k = max(1, round(ratio * d))" if re.search(r"\bk\b", entry.wire_bits) else ""
    learning = f"; {entry.learning_bits} in steps in which it learns" if entry.learning_bits else ""
    return f"{entry.wire_bits}, for d values, n by m{where_k}{learning}"


def sizes(entry: Entry) -> str:
    """What the formula comes to for shapes of common layers, against float32."""
    method = gradwire.methods.get(entry.name)()
    told = []
    for n, m, shape in ((64, 576, "64x64x3x3"), (1000, 1000, "1000x1000"), (4096, 4096, "4096x4096")):
        size = method.declared_bits(n, m) / 8
        fewer = 4 * n * m / size
        told.append(f"{shape}: {human_bytes(size)}, 1/{f'{fewer:.3g}' if fewer < 1000 else f'{fewer:,.0f}'} of float32")
    return "; ".join(told)


def human_bytes(size: float) -> str:
    """In B, kB or MB."""
    for unit, name in ((1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.3g} B"


def _short_source(entry: Entry) -> str:
    return entry.citation.partition(",")[0]


def _clipped(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: max(room - 1, 0)].rstrip()}…"


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
            f"`{entry.wire_bits}`" + (f", learning `{entry.learning_bits}`" if entry.learning_bits else ""),
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
    lines += ["", _OTHER_NAMES + "\n".join(f"| {name} | `{line}` | {source} |" for name, line, source in OTHER_NAMES)]
    lines += ["", "## Measured", "", f"{where}.", "", f"![size against error]({PICTURE.as_posix()})", ""]
    columns = ["method", "bits", "encode GB/s", "decode GB/s", "error", *(["accuracy"] if accuracies else [])]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    usual = {contender: gain for contender, gain in accuracies.items() if "memory=none" not in contender}
    for each in measured:
        gain = ", ".join(_gain(run, usual[run], each.name) for run in usual if run.partition(":")[0] == each.name)
        error = "" if each.error is None else f"{each.error:.2g}"
        speeds = f"{each.encode_gbps:.2f}", f"{each.decode_gbps:.2f}"
        figures = [f"`{each.name}`", f"{each.bits:.3g}", *speeds, error, gain]
        lines.append(f"| {' | '.join(figures[: len(columns)])} |")
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
    usual, *_ = entry.granularities
    if {each.partition(":")[0] for each in entry.granularities} != _ALL:
        return ", ".join(entry.granularities)
    return f"all, usually {usual}" if ":" in usual else "all"


def _options(entry: Entry) -> str:
    return ", ".join(f"`{option}={value!r}`" for option, value in entry.options.items())
