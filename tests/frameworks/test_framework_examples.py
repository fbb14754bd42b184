"""Every example with another framework trains, and the one that saves goes on where it ended."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from gradwire.lab import Lab

EXAMPLES = Path(__file__).parents[2] / "examples"
BACKENDS = ("tensorflow", "jax", "torch")


def said(name: str, *arguments: str, needs: tuple[str, ...], **environment: str) -> tuple[float, int, float]:
    """Accuracy, steps and ratio, as rank 0 printed them last."""
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; make test-frameworks installs it")
    told = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", **environment}
    with Lab(2, None) as lab:
        printed = lab.run([sys.executable, str(EXAMPLES / name), *arguments], env=told, timeout=300).outputs[0]
    found = re.findall(r"accuracy (\d\.\d+); (\d+) steps, .* sent, (\d+\.\d) times fewer", printed)
    assert found, printed
    return float(found[-1][0]), int(found[-1][1]), float(found[-1][2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_keras_goes_on_where_it_ended(tmp_path: Path, backend: str) -> None:
    for wanted in (0.8, 0.85):
        accuracy, steps, ratio = said(
            "keras_fit.py", "--folder", str(tmp_path), needs=("keras", backend), KERAS_BACKEND=backend
        )
        assert accuracy > wanted
        assert steps == 120
        assert ratio > 5


@pytest.mark.parametrize(("name", "needs"), [("tensorflow_loop.py", "tensorflow"), ("jax_optax.py", "optax")])
def test_own_loops(name: str, needs: str) -> None:
    accuracy, steps, ratio = said(name, needs=(needs,))
    assert accuracy > 0.85
    assert steps == 300
    assert ratio > 5
