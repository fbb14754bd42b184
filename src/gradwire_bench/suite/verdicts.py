"""A picture of a paper's claims: the interval that decides each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from gradwire_bench.pictures import BASELINE_COLOUR, figure_of, log_axis, save
from gradwire_bench.suite.claims import Finding
from gradwire_bench.suite.measures import MEASURES

_COLOURS = {"holds": "#009E73", "does not hold": "#D55E00", "cannot tell": "#8a8a8a"}


def draw(found: Sequence[Finding], path: Path) -> None:
    """Draws the interval of each claim's difference or factor, a panel for each kind of figure.

    Args:
        found: What was found; claims without an interval are left out.
        path: The PNG file.
    """
    places = list(
        dict.fromkeys((each.claim.measure, each.claim.relation == "times") for each in found if each.interval)
    )
    if not places:
        return
    panels = [
        [each for each in found if each.interval and (each.claim.measure, each.claim.relation == "times") == place]
        for place in places
    ]
    figure, axes = figure_of((10, 0.9 + 0.42 * sum(map(len, panels)) + 0.7 * len(panels)), len(panels), 1)
    for ((measure, factor), here), (panel,) in zip(zip(places, panels, strict=True), axes, strict=True):
        for row, each in enumerate(here):
            low, middle, high = each.interval or (0.0, 0.0, 0.0)
            colour = _COLOURS[each.verdict]
            panel.errorbar(middle, row, xerr=[[middle - low], [high - middle]], fmt="o", color=colour, capsize=3)
            if each.claim.relation == "equal":
                panel.barh(row, 2 * each.claim.margin, 0.6, -each.claim.margin, color="#eeeeee", zorder=0)
            if factor:
                panel.plot([each.claim.margin] * 2, [row - 0.3, row + 0.3], color=BASELINE_COLOUR)
        panel.axvline(1.0 if factor else 0.0, color=BASELINE_COLOUR, linewidth=0.8)
        if factor:
            log_axis(panel)
        panel.set_yticks(range(len(here)), ["\n".join(wrap(each.claim.text, 52)) for each in here], fontsize=8)
        panel.tick_params(axis="y", length=0)
        panel.set_ylim(len(here) - 0.5, -0.5)
        unit = "times better (logarithmic); bar: as claimed" if factor else MEASURES[measure].unit
        panel.set_xlabel(f"{MEASURES[measure].title}: {unit}", fontsize=9)
    save(figure, path)
