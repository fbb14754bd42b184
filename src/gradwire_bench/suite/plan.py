"""Plans: TOML files with grids of cells, and with what a paper claims of them."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradwire.errors import ConfigurationError, did_you_mean
from gradwire_bench.cell import AXES, Cell
from gradwire_bench.placement import Device
from gradwire_bench.suite.claims import Claim

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        name: Its file's.
        title: In a line.
        about: What is measured; for a paper where it was published, and with which settings.
        scaled: What is smaller than in the paper, and why.
        cells: The measurements, in order.
        claims: What they are to decide.
        elsewhere: What was measured by another command, in Markdown, for the page of a paper.
    """

    name: str
    title: str
    about: str
    scaled: tuple[tuple[str, str], ...]
    cells: tuple[Cell, ...]
    claims: tuple[Claim, ...]
    elsewhere: str = ""

    def on(self, device: Device) -> Plan:
        """The plan with the models that torch trains on a device."""
        moved = (cell.kind in ("trial", "train") and cell.framework == "torch" for cell in self.cells)
        cells = (replace(cell, device=device) if move else cell for cell, move in zip(self.cells, moved, strict=True))
        return replace(self, cells=tuple(cells))

    def only(self, filters: Sequence[str]) -> list[Cell]:
        """The cells that have all of some values, each ``axis=value``; several of one axis are alternatives.

        Raises:
            ConfigurationError: If there is no such axis, or no cell is left.
        """
        wanted: dict[str, list[str]] = {}
        for each in filters:
            axis, equals, value = each.partition("=")
            if not equals or axis not in AXES:
                hint = "" if axis in AXES else did_you_mean(axis, list(AXES))
                raise ConfigurationError(f"--only {each!r}: {hint}write axis=value, axis one of {', '.join(AXES)}")
            wanted.setdefault(axis, []).append(value)
        chosen = [
            cell for cell in self.cells if all(str(getattr(cell, axis)) in values for axis, values in wanted.items())
        ]
        if not chosen:
            raise ConfigurationError(f"no cell of {self.name} has {' and '.join(filters)}; --plan shows what it has")
        return chosen


def presets() -> list[str]:
    """Names of the suite's plans."""
    return sorted(path.stem for path in (FOLDER / "presets").glob("*.toml"))


def papers() -> list[str]:
    """Names of the papers that can be reproduced."""
    return sorted(path.stem for path in (FOLDER / "papers").glob("*.toml"))


def load(kind: str, name: str) -> Plan:
    """A plan of ours by its name, or a file.

    Args:
        kind: ``"presets"`` or ``"papers"``.
        name: As of :func:`presets` or :func:`papers`, or a path to a TOML file.

    Raises:
        ConfigurationError: If there is none, or it is not of this form.
    """
    known = presets() if kind == "presets" else papers()
    path = FOLDER / kind / f"{name}.toml" if name in known else Path(name)
    if path.suffix != ".toml" or not path.is_file():
        raise ConfigurationError(
            f"{name!r} is not known; {did_you_mean(name, known)}choose one of {', '.join(known)}, or a .toml file"
        )
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        cells = [cell for grid in content["grid"] for cell in cells_of(grid)]
        return Plan(
            path.stem,
            content["title"],
            content["about"].strip(),
            tuple((each["what"], each["why"]) for each in content.get("scaled", [])),
            tuple(dict.fromkeys(cells)),
            tuple(Claim.of(each) for each in content.get("claim", [])),
            content.get("elsewhere", "").strip(),
        )
    except ConfigurationError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{path} is no plan: {error!r}; those of gradwire show the form") from error


def cells_of(grid: dict[str, Any]) -> list[Cell]:
    """The product of a grid's lists, the seed outermost, so that a run that ends early has whole seeds."""
    if unknown := grid.keys() - AXES.keys():
        raise ConfigurationError(f"a grid has no axis {sorted(unknown)}; its axes are {', '.join(AXES)}")
    if "gpu" in grid.get("kind", ()):
        raise ConfigurationError("kind 'gpu' is not for a plan; run gradwire bench gpu, which leaves records of it")
    axes = {name: value if isinstance(value, list) else [value] for name, value in grid.items()}
    ordered = {"seed": axes.pop("seed", [0]), **axes}
    return [Cell(**dict(zip(ordered, values, strict=True))) for values in itertools.product(*ordered.values())]
