"""The bounds are those of sources whose bounds are known, and measurements lie where they must."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from gradwire_bench import frontier, frontier_report
from gradwire_bench.contenders import Contender
from gradwire_bench.frontier import blahut_arimoto, differential_entropy, empirical_bound, gaussian_bound
from gradwire_bench.gradients import Recording

GENERATOR = np.random.default_rng(0)
GAUSSIAN = GENERATOR.standard_normal(30_000)
LAPLACIAN = GENERATOR.laplace(size=30_000)


def decibels(error: float) -> float:
    return 10 * math.log10(error)


def test_water_filling_gives_each_layer_what_its_energy_deserves() -> None:
    """Two layers of variances 16 and 1: below 1 bit in the mean only the first is told; then both alike."""
    bound = gaussian_bound([np.full(100, 4.0), np.full(100, 1.0)])
    assert bound.error(1.0) * 17 == pytest.approx(1 + 1, rel=1e-3)
    assert bound.error(0.5) * 17 == pytest.approx(4 + 1, rel=0.02)
    assert bound.error(3.0) * 17 == pytest.approx(2 * 4 * 2**-6, rel=1e-3)


def test_entropies_are_those_of_their_densities() -> None:
    assert differential_entropy(GAUSSIAN) == pytest.approx(0.5 * math.log2(2 * math.pi * math.e), abs=0.02)
    assert differential_entropy(LAPLACIAN) == pytest.approx(math.log2(2 * math.e), abs=0.02)


@pytest.mark.parametrize("level", [0.9, 0.5, 0.1, 0.03])
def test_the_curve_of_a_gaussian_is_found(level: float) -> None:
    bits, error = blahut_arimoto(GAUSSIAN, level)
    assert decibels(error) + 20 * math.log10(2) * bits == pytest.approx(0, abs=0.15)


@pytest.mark.parametrize("bits", [0.05, 0.3, 1.0, 2.0, 4.0])
def test_a_bound_of_values_as_they_are_is_close_to_known_ones(bits: float) -> None:
    """A Gaussian's is its own; a Laplacian's, whose variance is 2, lies between Shannon's bound and a Gaussian's."""
    assert decibels(empirical_bound([GAUSSIAN]).error(bits)) == pytest.approx(-20 * math.log10(2) * bits, abs=0.2)
    found, gaussian = empirical_bound([LAPLACIAN]).error(bits), 2 ** (-2 * bits)
    shannon = (2 * math.e) ** 2 / (2 * math.pi * math.e) * gaussian / 2
    assert decibels(shannon) - 0.1 <= decibels(found) <= decibels(gaussian) + 0.1


def test_the_frontier_of_values_taken_one_by_one_is_not_crossed_without_a_pattern(tmp_path: Path) -> None:
    """Of noise in which no value says anything of the next nothing is below the bound, and deadzone's codes, which hope
    that it does, cost up to 3.5 dB: more than on any gradient that was seen."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(80, 150, generator=generator) * torch.randn(80, 150, generator=generator)
    recording = Recording.of(
        "noise, 1 steps in", [{"w": each, "bias": torch.ones(7)} for each in (noise, noise.flip(0))]
    )
    assert len(recording.values) == noise.numel()
    chosen = ["deadzone:bits=0.1", "deadzone:bits=1.0", "deadzone:bits=4.0", "topk:ratio=0.05", "qsgd:bits=4"]
    told: list[int] = []
    (found,) = frontier.measure(
        [recording], [Contender.parse(each) for each in chosen], lambda done, total, name: told.append(total - done)
    )
    assert told == list(range(11, 0, -1))
    by_name = {(point.method, point.granularity): point for point in found.points}
    assert all(point.decibels >= -0.05 for point in found.points), found.points
    for bits in (0.1, 1.0, 4.0):
        own = by_name[f"deadzone bits={bits}", "model"]
        assert own.bits == pytest.approx(bits, rel=0.1)
        assert own.decibels <= 3.5
        assert min(point.decibels for name, point in by_name.items() if "deadzone" not in name[0]) > own.decibels
    console = Console(record=True, width=160)
    console.print(frontier_report.table(found))
    text = console.export_text()
    assert "topk ratio=0.05" in text
    assert "x bits of deadzone" in text
    frontier_report.draw([found], tmp_path / "frontier.png", "here")
    assert (tmp_path / "frontier.png").stat().st_size > 10_000
