"""Figures of ``docs/advice.md``: ``python -m gradwire_bench.advice docs/images``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from gradwire.cost.advice import Candidate
from gradwire.cost.costs import FREE, Costs, Profile
from gradwire.cost.network import Level, Links
from gradwire.cost.scene import Scene
from gradwire.cost.shapes import get
from gradwire.cost.simulation import Setting, plain, simulate
from gradwire.cost.workload import Workload
from gradwire.engine.configuration import Configuration
from gradwire_bench import closed_forms, origin
from gradwire_bench.contenders import Contender
from gradwire_bench.cost_pictures import RATES, curves
from gradwire_bench.pictures import BASELINE_COLOUR, COLOURS, axes_of, save

WORKERS = (2, 4, 8, 16, 32, 64, 128)


class Nothing(Profile):
    """A device on which encoding takes no time, as in the closed forms."""

    def of(self, configuration: Configuration) -> tuple[Costs, str]:
        """Nothing."""
        return FREE, ""


def _configuration(method: str) -> Configuration:
    return Contender.parse(method).configuration()


def break_even(path: Path) -> dict[str, Any]:
    """One-bit signs by both routes against dense, in closed form and simulated, averages alone."""
    figure, axes = axes_of((7.5, 4.6))
    model = get("resnet50")
    found: dict[str, Any] = {"workers": WORKERS}
    dense = [closed_forms.link_bytes("allreduce", 4 * model.numel, n) for n in WORKERS]
    for route, colour in (("gather", COLOURS[3]), ("sharded", COLOURS[2])):
        simulated, ratio = [], 1.0
        for n in WORKERS:
            network = Links((Level(n, 1e9, 0.0),), efficiency=1.0)
            setting = Setting(Workload.of(model, 0.0), network, Nothing("none", "computed", ""))
            prediction = simulate(_configuration(f"signsgd:route={route}"), setting)
            simulated.append(prediction.seconds / plain(setting).seconds)
            ratio = closed_forms.link_bytes(route, 4 * model.numel, n) / prediction.wire_bytes  # type: ignore[arg-type]
        formula = [
            closed_forms.link_bytes(route, 4 * model.numel / ratio, n) / whole  # type: ignore[arg-type]
            for n, whole in zip(WORKERS, dense, strict=True)
        ]
        axes.plot(WORKERS, formula, color=colour, label=f"{route}, closed form")
        axes.plot(WORKERS, simulated, "o", color=colour, label=f"{route}, simulated")
        found[route] = {"simulated": simulated, "formula": formula, "ratio": ratio}
    axes.axhline(1.0, color=BASELINE_COLOUR, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(WORKERS, [str(n) for n in WORKERS])
    axes.set_xlabel("workers")
    axes.set_ylabel("time of the average, times dense fp32")
    axes.legend(frameon=False, fontsize=8)
    save(figure, path)
    return found


FINDINGS = {
    "Sign-SGD: gather, after backward": "signsgd:route=gather,granularity=model",
    "Top-k 1 %: gather, after backward": "topk:ratio=0.01,route=gather,granularity=model",
    "signs, sharded, with backward": "efsignsgd",
    "Top-k 1 %, sharded, with backward": "topk:ratio=0.01,route=sharded",
    "PowerSGD rank 4": "powersgd:rank=4",
    "ACP-SGD rank 4": "acpsgd:rank=4",
}
SCENES = (
    Scene("resnet50", 32, "1gbit", "50us", "v100-fp32:64", "a100", 4),
    Scene("resnet50", 32, "10gbit", "50us", "v100-fp32:64", "a100", 4),
    Scene("resnet50", 32, "100gbit", "5us", "v100-fp32:64", "a100", 4),
    Scene("bert-large", 32, "10gbit", "50us", "0.3", "a100", 4),
)


def findings(path: Path) -> list[dict[str, Any]]:
    """What the founding papers found, out of the simulator: 8 nodes of 4 GPUs."""
    figure, axes = axes_of((8.5, 5.4))
    found = []
    for place, scene in enumerate(SCENES):
        setting = scene.setting()
        full = plain(setting)
        rows = [
            ("DDP fp32", full),
            *((label, simulate(_configuration(method), setting)) for label, method in FINDINGS.items()),
        ]
        for index, (label, row) in enumerate(rows):
            colour = (BASELINE_COLOUR, *COLOURS)[index]
            height = place + 0.12 * (3 - index)
            axes.barh(
                -height, row.seconds / full.seconds, height=0.11, color=colour, label=label if not place else None
            )
            axes.text(
                row.seconds / full.seconds + 0.01, -height, f"{1e3 * row.seconds:.0f} ms", fontsize=6, va="center"
            )
            found.append(
                {
                    "scene": f"{scene.shapes}, {scene.link}",
                    "method": label,
                    "seconds": row.seconds,
                    "exposed": row.exposed,
                    "wire_bytes": row.wire_bytes,
                }
            )
    axes.set_yticks([-place for place in range(len(SCENES))], [f"{s.shapes}\n{s.link}" for s in SCENES])
    axes.set_xlabel("time of a step, times DDP fp32 (32 workers, 4 in a node)")
    axes.axvline(1.0, color="#222222", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=3)
    save(figure, path)
    return found


def frontier(path: Path) -> list[dict[str, Any]]:
    """Above which rate nothing gains over 16-bit averages on one H200 a link, 8 workers."""
    figure, axes = axes_of((7.5, 4.6))
    found = []
    colours = iter((COLOURS[4], COLOURS[2]))
    for name, step in (("resnet50", 0.06), ("gpt2", 0.065)):
        colour, model = next(colours), get(name)
        hides = closed_forms.hiding_rate(2 * model.numel, 8, 2 / 3 * step)
        scene = Scene(name, 8, "10gbit", "5us", str(step), "h200")
        ways = [Candidate.make("bf16", {}), Candidate.make("acpsgd", {"rank": 4})]
        full, half, best = curves(scene, model, ways)
        gains = [min(a, b) / c for a, b, c in zip(full.seconds, half.seconds, best.seconds, strict=True)]
        axes.plot(RATES, gains, color=colour, label=f"{name}, {1e3 * step:.0f} ms a step")
        axes.axvline(hides, color=colour, linewidth=0.8, linestyle="--")
        found.append({"model": name, "step": step, "bf16_hides_above": hides, "rates": RATES, "gains": gains})
    axes.axhline(1.0, color=BASELINE_COLOUR, linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("rate of a link, bit/s; dashed: 16 bits hide behind backward, in closed form")
    axes.set_ylabel("ACP-SGD rank 4, times the best dense average")
    axes.legend(frameon=False, fontsize=8)
    save(figure, path)
    return found


def main() -> None:
    """Draws all of them into the folder given, and writes what they show beside them."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    shown = {
        "break_even": break_even(folder / "advice_break_even.png"),
        "findings": findings(folder / "advice_findings.png"),
        "frontier": frontier(folder / "advice_frontier.png"),
    }
    origin.write_text(folder.parent / "data" / "advice.json", json.dumps(shown, indent=1) + "\n")


if __name__ == "__main__":
    main()
