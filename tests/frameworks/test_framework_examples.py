"""Every example with another framework trains, and the one that saves goes on where it ended."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from copies import BY_ITSELF
from gradwire.lab import Lab

EXAMPLES = Path(__file__).parents[2] / "examples"
BACKENDS = ("tensorflow", "jax", "torch")


def said(python: str, name: str, *arguments: str, again: bool = False, **environment: str) -> tuple[float, int, float]:
    """Accuracy, steps and ratio, as rank 0 printed them last, which imports all by itself the first time."""
    told = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", **environment}
    told[BY_ITSELF] = "none" if again else "0"
    with Lab(2, None) as lab:
        printed = lab.run([python, str(EXAMPLES / name), *arguments], env=told, timeout=300).outputs[0]
    found = re.findall(r"accuracy (\d\.\d+); (\d+) steps, .* sent, (\d+\.\d) times fewer", printed)
    assert found, printed
    return float(found[-1][0]), int(found[-1][1]), float(found[-1][2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_keras_goes_on_where_it_ended(tmp_path: Path, backend: str, quick_keras: Callable[..., str]) -> None:
    python = quick_keras(backend)
    for wanted, again in ((0.8, False), (0.85, True)):
        accuracy, steps, ratio = said(
            python, "keras_fit.py", "--folder", str(tmp_path), again=again, KERAS_BACKEND=backend
        )
        assert accuracy > wanted
        assert steps == 120
        assert ratio > 5


@pytest.mark.parametrize(("name", "backend"), [("tensorflow_loop.py", "tensorflow"), ("jax_optax.py", "jax")])
def test_own_loops(name: str, backend: str, quick_keras: Callable[..., str]) -> None:
    accuracy, steps, ratio = said(quick_keras(backend), name)
    assert accuracy > 0.85
    assert steps == 300
    assert ratio > 5
