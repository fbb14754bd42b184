"""Recipes for the terminal and as a page of the documentation, from the same trainings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from rich.table import Table
from rich.text import Text

from gradwire_bench.contenders import DDP
from gradwire_bench.recipes import POINTS, SEEDS, SHARE_OF_LOSS, TRIES, Cell, Row, by_loss, line
from gradwire_bench.terminal import table
from gradwire_bench.trial import STEPS
from gradwire_bench.workloads import WORKLOADS, Name

PICTURE = Path("images") / "recipes.png"
"""Of what is lost against bytes, beside the page."""

USUAL = 4
"""Workers, where a table does not say how many."""

OPTIMIZER_NAMES = {"sgd": "SGD", "momentum": "SGD with momentum 0.9", "adamw": "AdamW", "muon": "Muon and AdamW"}

_INTRODUCTION = f"""# Recipes

Which line keeps the accuracy under your optimizer? Each method got the same tuning effort as dense averages: its
learning rate, then half and twice it, and further to the better side, {TRIES} rates at most, by the result of one seed;
then {SEEDS} seeds at the best rate, and at the next best if these lie more than a tenth apart, because some diverge,
and at the learning rate of dense averages; of these the best mean counts. Dense averages got as many rates as it took
until neither side was better. A method's first rate is theirs, times a constant that its step length asks for (0.1 for
signs). A line **keeps** the accuracy if the mean over seeds is within {POINTS} points of dense averages' for images, or
within {SHARE_OF_LOSS:.0%} of their loss for text. *As pasted* is what it loses at the learning rate of dense
averages, by the mean of as many seeds.

* **image**: a CNN with batch norm, 103 k parameters, on Fashion-MNIST, {STEPS["image"]} steps of
  {USUAL} x {WORKLOADS["image"].batch} images: about one epoch; the score is the accuracy on 10,000 test images, in
  percent.
* **alexnet**: five convolutions and three dense layers without normalisation, 192 k parameters, on the same images for
  as many steps.
* **resnet20**: a residual network with batch norm, 68 k parameters, on the same images for as many steps, with
  `subspace` alone.
* **gpt**: a transformer of 2 layers with 64 units, 137 k parameters, on the bytes of the sources of Python's standard
  library, {STEPS["gpt"]:,} steps of {USUAL} x {WORKLOADS["gpt"].batch} pieces of 64 bytes; the score is the loss on
  held-out files, in bits a byte.
* **language**: a GRU of 114 k parameters, {STEPS["language"]:,} steps of {USUAL} x {WORKLOADS["language"].batch} pieces
  of the same text. Its tables, those of alexnet, and the transformer's under momentum, have the lines that
  `gradwire.compress(model)` takes, and local steps.

Tables are of {USUAL} workers but where they say so. More workers take as many steps, and so see more in each: dense
averages were tuned anew for them.

What `gradwire.compress(model)` takes is settled by the task that loses most: the residual network, which keeps its
accuracy under momentum with 1.5 bits of `subspace` and not with 0.8. Under AdamW it loses 0.57 points as pasted with
1.5 bits and none with 3, which was trained there alone; its seeds lie up to 1.1 points from each other.

Methods that carry a momentum of their own (`dgc`, `demo`, `dion`, `ef21sgdm`, `blocksgdm`) were trained with plain SGD
and stand beside SGD with momentum. Lines with `periodic` average what so many local steps changed; `nesterov` is the
outer optimizer of [periodic.md](periodic.md#recipes). Local steps ask for another learning rate than dense averages do:
twice theirs under AdamW.

*Muon and AdamW* is torch's Muon for hidden matrices, with steps as long as AdamW's (`adjust_lr_fn="match_rms_adamw"`),
and AdamW for embeddings, what makes the scores, and vectors, all at one learning rate; it has the tasks of text, as
convolutions are no matrices. Muon makes small directions of a matrix as long as large ones, and it may be for that that
the transformer loses more than under the others: 0.8 % as pasted with 1.5 bits, 1.3 % with the worst of three seeds;
with 3 bits 0.4 %.

The learning rate rises over a fifth of the steps, then falls along a cosine. All workers run in one process, on the
wire's own code; the bytes are those that it would hand over to be sent. All-reduces and shares (`powersgd`, `acpsgd`,
`qsgd`) take as much with any number of workers, but for some bytes a share; what is gathered (`topk`, `deadzone`,
`subspace` without `route="sharded"`) goes to all others. So `gradwire.compress(model, "recipe:sgd")` takes, of what
keeps the accuracy as pasted in all of an optimizer's tables, the line with which your number of workers sends least,
and where no line does, as under AdamW, the one that loses least; `gradwire.compress(model)` takes the one of all
optimizers. Either logs what the line lost at most.

`gradwire recipes` prints these tables. What is not in them has not been trained yet: `gradwire bench recipes --docs
docs --out src/gradwire_bench/recipes.json` goes on from there, which takes hours, and makes this page.
"""


def compared(rows: Sequence[Row]) -> list[Row]:
    """Rows of cells in which more was trained than dense averages."""
    trained = {row.cell for row in rows if row.method != DDP}
    return [row for row in rows if row.cell in trained]


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """A table a cell, for the terminal."""
    for cell, group in panels(compared(rows)):
        heads = ("x fewer bytes", _score_name(cell[0]), _lost_name(cell[0]), "rate", "as pasted", "")
        shown = table(_heading(cell), "line", *heads)
        for number, row in enumerate(group):
            verdict = Text("keeps", "green") if row.keeps else Text("loses", "red")
            shown.add_row(Text(line(row.method)), *_figures(row), verdict if number else "")
        yield shown


def page(rows: Sequence[Row], where: str) -> str:
    """``docs/recipes.md``.

    Args:
        rows: Settled methods, cell by cell.
        where: The machine and the date, in a line.
    """
    rows = compared(rows)
    parts = [_INTRODUCTION, f"![Loss against bytes]({PICTURE.as_posix()})\n", "## In short\n", _short(rows)]
    for cell, group in panels(rows):
        parts += [
            f"## {_heading(cell)}\n",
            f"| line | x fewer bytes | {_score_name(cell[0])} | {_lost_name(cell[0])} | learning rate | as pasted | |",
            "|---|---:|---:|---:|---:|---:|---|",
        ]
        for number, row in enumerate(group):
            verdict = ("**keeps**" if row.keeps else "") if number else "dense"
            parts.append(f"| `{line(row.method)}` | {' | '.join(_figures(row))} | {verdict} |")
        parts.append("")
    parts.append(f"{where}\n")
    return "\n".join(parts)


def short(row: Row) -> str:
    """A method in few letters, for a picture: without the names of its options."""
    return " ".join(part.partition("=")[2] or part for part in row.method.replace(":", ",", 1).split(","))


def _short(rows: Sequence[Row]) -> str:
    """For each cell the line that keeps with the fewest bytes."""
    lines = [
        "| | fewest bytes that keep the accuracy | x fewer bytes | lines that keep it at 20 x fewer |",
        "|---|---|---:|---|",
    ]
    for cell, group in panels(rows):
        kept = [row for row in group[1:] if row.keeps]
        many = ", ".join(f"`{row.method}`" for row in kept if row.fewer_bytes >= 20)
        best = f"`{line(kept[0].method)}` | {kept[0].fewer_bytes:.0f}" if kept else "none | "
        lines.append(f"| {title(cell)} | {best} | {many or 'none'} |")
    return "\n".join(lines) + "\n"


def panels(rows: Sequence[Row]) -> Iterator[tuple[Cell, list[Row]]]:
    """Cell by cell, dense averages of each first."""
    for cell, group in groupby(rows, key=lambda row: row.cell):
        yield cell, list(group)


def title(cell: Cell) -> str:
    """A cell in few words."""
    workload, optimizer, workers = cell
    return f"{workload}, {OPTIMIZER_NAMES[optimizer]}" + ("" if workers == USUAL else f", {workers} workers")


def _figures(row: Row) -> list[str]:
    digits = 3 if by_loss(row.workload) else 2
    score = f"{row.score:.{digits}f} ± {row.spread / 2:.{digits}f}"
    pasted = "" if row.pasted is None else f"{row.pasted:+.2f}"
    return [f"{row.fewer_bytes:.1f}", score, f"{row.lost:+.2f}", f"{row.learning_rate:g}", pasted]


def _heading(cell: Cell) -> str:
    workload, what = cell[0], WORKLOADS[cell[0]].what
    name = what if what.lower() == workload else f"{workload.capitalize()} ({what})"
    return title(cell).replace(workload, name, 1)


def _score_name(workload: Name) -> str:
    return "loss in bits a byte" if by_loss(workload) else "accuracy in %"


def _lost_name(workload: Name) -> str:
    return "% of the loss more" if by_loss(workload) else "points lost"
