"""Between a gradient and its average the host reads no value, so that a device need not be waited for."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from gradwire import methods
from gradwire.engine.configuration import Configuration
from gradwire.engine.engine import Engine
from gradwire.engine.policy import DensePolicy
from gradwire.kernels import codes, dispatch
from gradwire.layout import flat_slots
from gradwire.wire import AllGather, Request, lockstep

WORKERS = 4
SLOTS = flat_slots([("matrix", (72, 48)), ("conv", (64, 4, 3, 3)), ("vector", (70,))])
META = torch.device("meta")

READS = {
    "adacomp": "counts of what reaches its bin's threshold",
    "adaptive": "counts and means of each sign",
    "atomo": "whether values are finite, and chances of singular values",
    "deadzone": "the step that fits",
    "demo": "whether coefficients are finite",
    "dgc": "positions and what is left at them",
    "dion": "whether what is left is finite",
    "dryden": "counts of each sign",
    "eden": "the payload's key",
    "ef21": "positions and what is left at them",
    "ef21sgdm": "positions and what is left at them",
    "globalqsgd": "whether the largest scale is one",
    "gradiveq": "whether values are finite, and whether a basis was learnt, which decides on sizes",
    "gtopk": "positions that are merged",
    "hybrid": "counts of what is sent",
    "inceptionn": "the room that is wanted",
    "loco": "the age of its memory",
    "oktopk": "positions and regions",
    "randomk": "whether what is left is finite",
    "sidco": "statistics of magnitudes",
    "sketchedsgd": "candidates",
    "sketchml": "positions and what is left at them",
    "strom": "counts of what reaches the threshold",
    "thc": "whether the largest norm is one",
    "threshold": "counts of what reaches the threshold",
    "topk": "positions and what is left at them",
    "variance": "counts of what is sent",
    "3lc": "the room that is wanted",
}
"""Methods of which the host still reads something; the list can only become shorter."""


class Kernels:
    """Kernels that do nothing but say that all is finite; what returns anything else has read values."""

    def get(self, name: str, otherwise: Any) -> Any:
        if name == "CODES":
            return codes.ALL
        returns = str(otherwise.__annotations__["return"])
        if returns not in ("bool", "None"):
            raise RuntimeError(f"{name} returns {returns}: it reads values")
        return lambda *arguments, **options: True if returns == "bool" else None


def answer(request: Request) -> torch.Tensor:
    payload = request.payload
    shape = (WORKERS, *payload.shape) if isinstance(request, AllGather) else payload.shape
    return torch.empty(shape, dtype=payload.dtype, device=META)


def three_steps(name: str) -> None:
    everything = DensePolicy(below=0, vectors=False)
    engine = Engine(Configuration.make(name, {}, dense=everything), 0, WORKERS, META)
    unit = engine.unit(SLOTS)
    for _ in range(3):
        rounds = lockstep(engine.synchronizations(unit, torch.empty(unit.numel, device=META)))
        asked = next(rounds, None)
        while asked is not None:
            try:
                asked = rounds.send([answer(request) for request in asked])
            except StopIteration:
                asked = None
        engine.step += 1


@pytest.mark.parametrize("name", methods.names())
def test_no_value_is_read_on_the_way(name: str) -> None:
    """A meta tensor has none, and says so when it is asked for one."""
    with mock.patch.object(dispatch, "overrides", return_value=Kernels()):
        if name in READS:
            with pytest.raises(
                (RuntimeError, NotImplementedError), match=r"on meta tensors|reads values|register_meta"
            ):
                three_steps(name)
        else:
            three_steps(name)


def test_the_list_is_of_methods() -> None:
    assert set(READS) <= set(methods.names())
