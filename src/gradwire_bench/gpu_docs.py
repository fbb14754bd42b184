"""Pages of the documentation that say when compression pays on GPUs, from what was measured, else from estimates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.cost import shapes
from gradwire.cost.costs import profile
from gradwire.cost.gpus import GPUS, TRAFFIC
from gradwire.cost.network import Level, Links
from gradwire.cost.shapes import Model, NamedShape
from gradwire.cost.simulation import Setting, plain, simulate
from gradwire.cost.workload import Workload
from gradwire.errors import ConfigurationError
from gradwire_bench import origin
from gradwire_bench.cell import Record
from gradwire_bench.contenders import Contender
from gradwire_bench.gpu_report import verdicts
from gradwire_bench.suite import ledger

PAGE, TABLES, DATA = Path("gpus.md"), Path("benchmarks.md"), Path("data/gpu.jsonl")
WORKERS = 8
BACKWARD = 2 / 3
"""Of a step."""

WAYS = {
    "bf16": "bf16",
    "4 bits": "qsgd:bits=4,owner=qsgd:4",
    "1 bit": "efsignsgd",
    "acpsgd, rank 4": "acpsgd:rank=4",
}


def _seven_billion() -> Iterator[NamedShape]:
    for layer in range(32):
        for name in ("q", "k", "v", "o"):
            yield f"layers.{layer}.{name}.weight", (4096, 4096)
        for name, shape in (("gate", (11008, 4096)), ("up", (11008, 4096)), ("down", (4096, 11008))):
            yield f"layers.{layer}.{name}.weight", shape
    yield "embed.weight", (32000, 4096)
    yield "head.weight", (32000, 4096)


@dataclass(frozen=True)
class Row:
    """A model in training.

    Attributes:
        model: Its shapes.
        seconds: Of a step as assumed.
        part: Of ``gradwire bench gpu``, whose step it is; empty if none is.
    """

    model: Model
    seconds: float
    part: str = ""


ROWS: dict[str, Row] = {
    "ResNet-50": Row(shapes.get("resnet50"), 0.06, "step:ResNet-50"),
    "GPT-2 124M": Row(shapes.get("gpt2"), 0.065, "step:GPT-2 124M"),
    "7 B parameters": Row(Model("7b", tuple(_seven_billion()), "Touvron et al. 2023, arXiv:2307.09288"), 0.85),
}


def kept(folder: Path) -> list[Record]:
    """What was measured when the pages were last written; nothing if it never was."""
    return ledger.Ledger(folder / DATA).records() if (folder / DATA).exists() else []


def write(folder: Path, records: Sequence[Record]) -> None:
    """Writes the tables into both pages, and the records beside them.

    Raises:
        ConfigurationError: As of :func:`check`; then nothing is written.
    """
    places = check(folder)
    if records:
        ledger.write(folder / DATA, records)
    for (page, (before, after)), table in zip(places.items(), (break_even(records), measured(records)), strict=True):
        origin.write_text(page, f"{before}\n{table}{after}")


def check(folder: Path) -> dict[Path, tuple[str, str]]:
    """Each page, and what stands before its table and after it.

    Raises:
        ConfigurationError: If one is not there or has no place for its table.
    """
    places = {}
    for page, name in ((folder / PAGE, "when it pays"), (folder / TABLES, "on GPUs")):
        if not page.is_file():
            raise ConfigurationError(
                f"there is no {page}; give the folder that has {PAGE} and {TABLES}, as docs of a clone"
            )
        begin, end = (f"<!-- {name}: {which} -->" for which in ("begin", "end"))
        before, found, rest = page.read_text(encoding="utf-8").partition(begin)
        _, ended, after = rest.partition(end)
        if not (found and ended):
            raise ConfigurationError(f"{page} has no lines {begin!r} and {end!r}; add them where its table goes")
        places[page] = before + begin, end + after
    return places


def break_even(records: Sequence[Record]) -> str:
    """The rates from which on each method's bytes hide behind backward, and what it takes of the GPU."""
    heads = ["step", "fp32", *WAYS, "of the GPU's time"]
    lines = [_line(heads), "|" + "---|" * len(heads)]
    taken, ways = profile("h200"), [Contender.parse(each) for each in WAYS.values()]
    for name, row in ROWS.items():
        steps = [each for each in records if each.cell.workload == row.part and "overhead" in each.result]
        seconds = 1e-3 * steps[0].result["dense_milliseconds"] if steps else row.seconds
        network = Links((Level(WORKERS, 1e10, 5e-6),), 1.0)
        setting = Setting(Workload.of(row.model, seconds, taken.copy), network, taken)
        predictions = plain(setting), *(simulate(each.configuration(), setting) for each in ways)
        sent = [each.wire_bytes for each in predictions]
        rates = [_rounded(8e-9 * each / (BACKWARD * seconds)) for each in sent]
        shares = [row.model.numel * _traffic(each.name) / GPUS["h200"] / seconds for each in ways]
        own = {each.name for each in ways}
        shares = [max(each.result["overhead"], 0.0) for each in steps if each.cell.method in own] or shares
        where = f"measured, {steps[0].machine['gpu']}" if steps else "assumed"
        of_time = f"{min(shares):.1%} to {max(shares):.1%}, {'measured' if steps else 'computed'}"
        lines.append(_line([f"{name}, {1e3 * seconds:.0f} ms, {where}", *rates, of_time]))
    return "\n".join(lines) + "\n"


def _traffic(method: str) -> float:
    """Bytes for a value that encoding and decoding would move in the time that they take, at a copy's speed."""
    moved = TRAFFIC[method]
    return (moved.encode + moved.decode + 2 * moved.row) / moved.share


def _rounded(number: float) -> str:
    return f"{float(f'{number:.2g}'):g}"


def measured(records: Sequence[Record]) -> str:
    """Verdicts and figures; that there are none where nothing was measured."""
    if not records:
        return "Not measured: no GPU was at hand. `gradwire bench gpu --docs docs` where there is one writes it here.\n"
    machine, first = records[0].machine, records[0]
    facts = ("gpu", "driver", "cuda", "nccl", "torch", "triton")
    lines = [f"{first.date[:10]}, {', '.join(f'{each} {machine.get(each)}' for each in facts)}:", ""]
    lines += ["```", first.command, "```", "", *(f"* {each}" for each in verdicts(records)), ""]
    lines += [*_kernels(records)]
    lines += ["", _line(["model", "method", "ms", "over DDP"]), "|---|---|---|---|"]
    for each in records:
        if "overhead" in each.result:
            figures = f"{each.result['milliseconds']:.2f}", f"{each.result['overhead']:+.1%}"
            lines.append(_line([each.cell.workload.partition(":")[2], each.cell.method, *figures]))
    return "\n".join(lines) + "\n"


def _kernels(records: Sequence[Record]) -> Iterator[str]:
    """A line for each kernel: microseconds, and the share of a copy's bandwidth, by numbers of values."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for each in records:
        if "of_copy" in each.result:
            numel = int(each.cell.workload.partition(":")[2])
            found.setdefault(each.cell.method, {})[numel] = each.result
    sizes = sorted({numel for results in found.values() for numel in results})
    heads = [f"{numel / 1e6:g} M values, µs" for numel in sizes]
    yield _line(["kernel", *heads, "of a copy", "target"])
    yield "|" + "---|" * (len(sizes) + 3)
    for name, results in found.items():
        cells = [f"{results[numel]['microseconds']:.0f}" if numel in results else "" for numel in sizes]
        shares = " / ".join(f"{results[numel]['of_copy']:.0%}" for numel in sizes if numel in results)
        target = max((result["target"] or 0.0 for result in results.values()), default=0.0)
        yield _line([name, *cells, shares, f"{target:.0%}" if target else ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
