"""Every method on tensors that say they are on a GPU: nothing mixes devices, bits are the CPU's, waits are known.

The kernels that there are in Triton stand for themselves; what has none runs as it would on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from elsewhere import CPU, GPU, There, a_gpu, here
from gradwire import methods
from gradwire.engine.configuration import Configuration
from gradwire.layout import flat_slots
from gradwire.local import LocalWorld
from gradwire.policy import DensePolicy
from kernel_inputs import same

SLOTS = flat_slots([("matrix", (24, 16)), ("conv", (4, 3, 3, 3)), ("vector", (70,))])

WAITS = {
    "3lc": "zero runs, by the CPU",
    "adacomp": "local maxima, by the CPU",
    "adaptive": "counts and means of each sign",
    "alq": "levels, by the reference",
    "amq": "levels, by the reference",
    "atomo": "singular values",
    "deadzone": "all its kernels, by the CPU",
    "dithered": "all its kernels, by the CPU",
    "dryden": "counts of each sign",
    "eden": "rotations, by the reference",
    "gtopk": "positions that are merged",
    "hybrid": "counts of what is sent",
    "inceptionn": "sizes, by the reference",
    "oktopk": "positions and regions",
    "sidco": "statistics of magnitudes",
    "sketchedsgd": "sketches, by the CPU",
    "sketchml": "quantiles, by the CPU",
    "strom": "counts of what reaches the threshold",
    "subspace": "the dead zone's kernels, by the CPU",
    "thc": "rotations, by the reference",
    "threshold": "counts of what reaches the threshold",
    "variance": "counts of what is sent",
}
"""Methods of which the host waits for the GPU within a step; the list can only become shorter."""


def averages(name: str, device: torch.device, waits: list[str]) -> list[Tensor]:
    """What three steps give; the waits of the third stay, when all is there that is made once."""
    everything = DensePolicy(below=0, vectors=False)
    world = LocalWorld(Configuration.make(name, {}, dense=everything), SLOTS, 2, device)
    given = []
    for step in range(3):
        waits.clear()
        generator = torch.Generator().manual_seed(step)
        gradients = [torch.randn(SLOTS[-1].stop, generator=generator) for _ in range(2)]
        if device == GPU:
            gradients = [There(each) for each in gradients]
        world.average(gradients)
        given.append(here(gradients[0]).clone())
    return given


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU of its own")
@pytest.mark.parametrize("name", methods.names())
def test_a_gpu_gives_the_bits_of_the_cpu(name: str) -> None:
    known = averages(name, CPU, [])
    with a_gpu() as gpu:
        found = averages(name, GPU, gpu.waits)
    for step, (left, right) in enumerate(zip(known, found, strict=True)):
        assert same(left, right), f"step {step}"
    assert bool(gpu.waits) == (name in WAITS), gpu.waits


def test_the_list_is_of_methods() -> None:
    assert set(WAITS) <= set(methods.names())


def _wrong(tensor: Tensor) -> Any:
    return torch.searchsorted(tensor, torch.arange(3.0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU of its own")
def test_it_is_strict() -> None:
    with a_gpu() as gpu:
        values = torch.arange(4.0, device=GPU)
        assert values.device == GPU
        assert gpu.waits == []
        with pytest.raises(RuntimeError, match="same device"):
            _wrong(values)
        with pytest.raises(RuntimeError, match="index or a value of what is on the CPU"):
            torch.zeros(4)[:4] = values
        assert float(values[1]) == 1
        values.copy_(torch.ones(4))
        assert values[values > 0].tolist() == [1, 1, 1, 1]
    assert gpu.waits == ["copy to the host", "copy to the GPU", "index", "copy to the host"]
