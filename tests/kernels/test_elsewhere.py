"""Every method on tensors that say they are on a GPU: nothing mixes devices, bits are the CPU's, waits are known.

The kernels that there are in Triton stand for themselves; what has none runs as it would on a GPU.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from elsewhere import CPU, GPU, There, a_gpu, here
from gradwire import kernels, methods
from gradwire.engine.configuration import Configuration
from gradwire.kernels.dispatch import BY_THE_CPU, KERNELS
from gradwire.kernels.reference import gaps_low_bytes
from gradwire.layout import flat_slots
from gradwire.local import LocalWorld
from gradwire.policy import DensePolicy
from gradwire.wire import StagedTransport
from kernel_inputs import same

SLOTS = flat_slots([("matrix", (24, 16)), ("conv", (4, 3, 3, 3)), ("vector", (70,))])

WAITS = {
    "3lc": "zero runs, by the CPU",
    "adacomp": "local maxima, by the CPU",
    "adaptive": "counts and means of each sign",
    "atomo": "singular values",
    "deadzone": "the sample of its step",
    "dithered": "the sample of its step, and whether it fits",
    "dryden": "counts of each sign",
    "eden": "rotations, by the reference",
    "gaussiank": "statistics of magnitudes",
    "gspar": "statistics of magnitudes, and counts of what is drawn",
    "gtopk": "positions that are merged",
    "hybrid": "counts of what is sent",
    "inceptionn": "sizes, by the reference",
    "oktopk": "positions and regions",
    "sbc": "counts of each sign, and means",
    "sidco": "statistics of magnitudes",
    "sketchedsgd": "sketches, by the CPU",
    "sketchml": "quantiles, by the CPU",
    "strom": "counts of what reaches the threshold",
    "subspace": "samples of its steps, and sizes of coordinates",
    "thc": "rotations, by the reference",
    "threshold": "counts of what reaches the threshold",
    "variance": "counts of what is sent",
}
"""Methods of which the host waits for the GPU within a step; the list can only become shorter."""


def averages(
    name: str,
    device: torch.device,
    waits: list[str],
    route: str | None = None,
    around: Any = lambda transport: transport,
) -> list[Tensor]:
    """What three steps give; the waits of the third stay, when all is there that is made once."""
    everything = DensePolicy(below=0, vectors=False)
    world = LocalWorld(Configuration.make(name, {}, dense=everything, route=route), SLOTS, 2, device, around)
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU of its own")
@pytest.mark.parametrize(
    ("name", "route"),
    [("qsgd", "sharded"), ("subspace", "sharded"), ("topk", "gather"), ("acpsgd", None), ("gtopk", None)],
)
def test_what_is_sent_may_go_through_the_host(name: str, route: str | None) -> None:
    """As over gloo: the collectives see the host's memory only, and averages are the same."""
    sent: list[Tensor] = []

    class Noted:
        """A line that notes what it is given to send."""

        def __init__(self, inner: Any) -> None:
            self.rank, self.world_size = inner.rank, inner.world_size
            self._inner = inner

        def __getattr__(self, collective: str) -> Any:
            def noted(payload: Tensor, *others: Any) -> Any:
                sent.append(payload)
                return getattr(self._inner, collective)(payload, *others)

            return noted

    known = averages(name, CPU, [], route)
    with a_gpu() as gpu:
        found = averages(name, GPU, gpu.waits, route, lambda inner: StagedTransport(Noted(inner), GPU))
    assert sent
    assert not any(isinstance(each, There) for each in sent)
    for left, right in zip(known, found, strict=True):
        assert same(left, right)


def test_the_list_is_of_methods() -> None:
    assert set(WAITS) <= set(methods.names())


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU of its own")
def test_what_the_cpu_wrote_comes_back_and_nothing_else() -> None:
    positions, classes = torch.arange(0, 40, 3), torch.zeros(14, dtype=torch.uint8)
    low = torch.zeros(gaps_low_bytes(14, 64), dtype=torch.uint8)
    with a_gpu() as gpu:
        given = [There(each.clone()) for each in (positions, classes, low)]
        kernels.gaps_encode(given[0], 64, given[1], low=given[2])
        assert gpu.waits == 3 * ["copy to the host"] + 2 * ["copy to the GPU"]
    kernels.gaps_encode(positions, 64, classes, low)
    for own, known in zip(given, (positions, classes, low), strict=True):
        assert torch.equal(here(own), known)


@pytest.mark.parametrize("name", BY_THE_CPU)
def test_what_the_cpu_writes_for_others_is_among_its_arguments(name: str) -> None:
    assert inspect.signature(KERNELS[name]).parameters.keys() >= BY_THE_CPU[name]


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
