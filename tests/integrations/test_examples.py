"""Every example runs, at small size, and those that save go on where they ended."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from copies import BY_ITSELF
from gradwire.lab import Lab, availability

EXAMPLES = Path(__file__).parents[2] / "examples"
NUMBER = r"(\d+\.\d+)"
COUNTED = r"(\d+) steps, .* sent, (\d+\.\d) times fewer bytes than dense"


@pytest.fixture
def quick(quick_python: Callable[..., str]) -> str:
    """A Python that has imported what examples do."""
    trainers = ("accelerate", "lightning", "transformers.trainer")
    installed = [each for each in trainers if importlib.util.find_spec(each.partition(".")[0])]
    return quick_python("gradwire.kernels.cpu", "torch._dynamo", *installed)


def said(python: str, name: str, *arguments: str, workers: int = 2, needs: str = "torch", again: bool = False) -> str:
    """What rank 0 printed, which imports all by itself the first time."""
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed; make test-integrations installs it")
    with Lab(workers, None) as lab:
        command = [python, str(EXAMPLES / name), *arguments]
        environment = {"TORCHELASTIC_RUN_ID": "lab", "CUDA_VISIBLE_DEVICES": "", BY_ITSELF: "none" if again else "0"}
        return lab.run(command, env=environment, timeout=300).outputs[0]


def test_ddp(quick: str) -> None:
    printed = said(quick, "ddp.py", "--steps", "30")
    losses = [float(each) for each in re.findall(rf"loss {NUMBER}", printed)]
    assert losses[0] > losses[-1]
    assert re.findall(COUNTED, printed)[-1][0] == "30"


def test_diloco(quick: str) -> None:
    printed = said(quick, "diloco.py", "--steps", "24", "--every", "8", workers=4)
    losses = [float(each) for each in re.findall(rf"loss {NUMBER}", printed)]
    assert len(losses) == 3
    assert losses[0] > losses[-1]
    (within, _), (between, ratio) = re.findall(COUNTED, printed)
    assert within == between == "24"
    assert float(ratio) > 8  # of which a factor of 8 is the period


@pytest.mark.skipif(not availability().possible, reason=availability().reason)
def test_diloco_between_sites(quick: str) -> None:
    """What the links between sites carry is what the handle of every worker there counts, and a little more."""
    with Lab(4, "1gbit", sites=2, between="100mbit") as lab:
        command = [quick, str(EXAMPLES / "diloco.py"), "--sites", "2", "--every", "8", "--steps", "24"]
        printed = lab.run(command, timeout=300).outputs[0]
        workers, sites = lab.counters(), lab.site_counters()
    within, between = (float(each) for each in re.findall(r"sites?: 24 steps, (\d+\.\d) kB sent", printed))
    assert within > between
    for site, each in enumerate(sites):
        assert each.tx_bytes > 2 * 1e3 * between
        assert each.tx_bytes < sum(worker.tx_bytes for worker in workers[2 * site : 2 * site + 2]) - 1e3 * within


@pytest.mark.parametrize("package", ["accelerate", "lightning"])
def test_goes_on_where_it_ended(tmp_path: Path, package: str, quick: str) -> None:
    folder, again = str(tmp_path / "saved"), "20" if package == "accelerate" else "40"
    first = said(quick, f"with_{package}.py", "--folder", folder, "--steps", "20", needs=package)
    second = said(quick, f"with_{package}.py", "--folder", folder, "--steps", again, needs=package, again=True)
    (steps, ratio), *_ = re.findall(COUNTED, first)
    assert steps == "20"
    assert float(ratio) > 2
    assert re.findall(COUNTED, second)[0][0] == "20"
    assert float(re.findall(rf"loss {NUMBER}", second)[-1]) < float(re.findall(rf"loss {NUMBER}", first)[-1])


def test_trainer(tmp_path: Path, quick: str) -> None:
    size = ["--layers", "1", "--width", "32", "--megabytes", "0.05", "--save-every", "10"]
    needs, folder = "transformers", ["--folder", str(tmp_path)]
    first = said(quick, "with_trainer.py", *folder, "--steps", "20", *size, needs=needs)
    at_first, at_last = re.findall(rf"loss {NUMBER} at first, {NUMBER} at last", first)[0]
    assert float(at_first) > float(at_last)
    assert re.findall(COUNTED, first)[0][0] == "20"
    assert "gradwire/recent/wire_bytes" in first
    again = said(quick, "with_trainer.py", *folder, "--steps", "30", "--resume", *size, needs=needs, again=True)
    assert re.findall(COUNTED, again)[0][0] == "10"
