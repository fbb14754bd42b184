"""Between a gradient and its average the host reads no value, so that a device need not be waited for.

What it must know in the next step goes there by :mod:`gradwire.deferred`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from gradwire import deferred, methods
from gradwire.deferred import Later
from gradwire.engine.configuration import Configuration
from gradwire.engine.engine import Engine
from gradwire.layout import flat_slots
from gradwire.memory import LowPass, MaskedMomentum, Momentum, Residual
from gradwire.policy import DensePolicy
from gradwire.wire import AllGather, Request, lockstep

WORKERS = 4
SLOTS = flat_slots([("matrix", (72, 48)), ("conv", (64, 4, 3, 3)), ("vector", (70,))])
META = torch.device("meta")

READS = {
    "adacomp": "counts of what reaches its bin's threshold",
    "adaptive": "counts and means of each sign",
    "atomo": "whether values are finite, and chances of singular values",
    "deadzone": "the step that fits",
    "dithered": "the step that fits, and whether all did",
    "dryden": "counts of each sign",
    "gaussiank": "statistics of magnitudes",
    "gradiveq": "whether a basis was learnt, which decides on sizes",
    "greedylore": "whether bases were learnt, which decides on rounds",
    "gspar": "statistics of magnitudes, and counts of what is drawn",
    "gtopk": "positions that are merged",
    "hybrid": "counts of what is sent",
    "intsgd": "whether there was an average yet, which decides on rounds",
    "oktopk": "positions and regions",
    "sbc": "counts of each sign, and means",
    "sidco": "statistics of magnitudes",
    "strom": "counts of what reaches the threshold",
    "subspace": "the step that fits, and whether values are finite",
    "threshold": "counts of what reaches the threshold",
    "variance": "counts of what is sent",
}
"""Methods of which the host still reads something; the list can only become shorter."""


def answer(request: Request) -> torch.Tensor:
    payload = request.payload
    shape = (WORKERS, *payload.shape) if isinstance(request, AllGather) else payload.shape
    return torch.empty(shape, dtype=payload.dtype, device=META)


def arrived(values: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Stands for what comes by pinned memory in the next step; what is expected is so."""
    return lambda: torch.ones(values.shape, dtype=values.dtype)


def three_steps(name: str, options: dict[str, Any] | None = None, **choices: Any) -> None:
    everything = DensePolicy(below=0, vectors=False)
    engine = Engine(Configuration.make(name, options or {}, dense=everything, **choices), 0, WORKERS, META)
    unit = engine.unit(SLOTS)
    later = Later()
    for _ in range(3):
        with mock.patch.object(deferred, "sent_to_host", arrived), later.collecting():
            rounds = lockstep(engine.synchronizations(unit, torch.empty(unit.numel, device=META)))
            asked = next(rounds, None)
            while asked is not None:
                try:
                    asked = rounds.send([answer(request) for request in asked])
                except StopIteration:
                    asked = None
            later.send()
        later.settle()
        engine.step += 1


@pytest.mark.parametrize("name", methods.names())
def test_no_value_is_read_on_the_way(name: str) -> None:
    """A meta tensor has none, and says so when it is asked for one."""
    if name in READS:
        with pytest.raises((RuntimeError, NotImplementedError), match=r"on meta tensors|reads values|register_meta"):
            three_steps(name)
    else:
        three_steps(name)


@pytest.mark.parametrize(
    ("name", "options", "choices"),
    [
        ("topk", {"values": "qsgd:4", "indices": "bitmap"}, {"route": "sharded"}),
        ("topk", {"indices": "raw"}, {"memory": MaskedMomentum(nesterov=True, clip=1.0)}),
        ("topk", {"values": "fp16"}, {"memory": "momentum", "route": "gather"}),
        ("randomk", {}, {"memory": "residual", "granularity": "model"}),
        ("randomk", {}, {"memory": "none"}),
        ("efsignsgd", {}, {"memory": "ef21", "route": "gather", "granularity": "block:512"}),
        ("efsignsgd", {}, {"memory": Residual(dtype="bfloat16")}),
        ("efsignsgd", {}, {"memory": Momentum(nesterov=True, memory=Residual())}),
        ("efsignsgd", {}, {"memory": LowPass(share=0.1), "owner": "qsgd:8"}),
        ("qsgd", {"bits": 4}, {"memory": "diana"}),
        ("fp16", {}, {"memory": "residual"}),
        ("bf16", {}, {"memory": "ef21"}),
        ("thc", {}, {"route": "gather", "memory": "momentum"}),
        ("sketchedsgd", {}, {"memory": "residual"}),
        ("scalecom", {}, {"memory": "lowpass"}),
    ],
)
def test_no_choice_reads_a_value(name: str, options: dict[str, Any], choices: dict[str, Any]) -> None:
    three_steps(name, options, **choices)


def test_the_list_is_of_methods() -> None:
    assert set(READS) <= set(methods.names())
