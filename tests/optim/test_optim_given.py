"""What optimizers that average are given: told where it is none of theirs, and taken from any library."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from compressed_adam import KINDS, made, meet
from gradwire.optim import CompressedAdam
from gradwire.optim.groups import make_valid
from local_training import backward, network
from models import flat
from pool import ranks

WRONG: list[tuple[str, Any]] = [
    ("lr", "x"),
    ("lr", "0.1"),
    ("lr", None),
    ("lr", 10**400),
    ("lr", math.nan),
    ("lr", torch.ones(2)),
    ("betas", ("x", 0.9)),
    ("betas", (0.9, math.nan)),
    ("betas", 0.9),
    ("betas", "xy"),
    ("eps", None),
    ("eps", math.nan),
    ("weight_decay", "0.1"),
    ("weight_decay", math.inf),
    ("floor", [0.1]),
]
OF_LAMB: list[tuple[str, Any]] = [
    ("trust", 5),
    ("trust", ("x", 1)),
    ("trust", (0.1, math.nan)),
    ("factors", None),
    ("trust_beta", "x"),
    ("change", math.nan),
]


@pytest.mark.parametrize("kind", list(KINDS))
@ranks(2)
def test_all_ranks_are_told_of_what_is_no_number(kind: str) -> None:
    net = network()
    before = flat(net)
    for name, value in WRONG + OF_LAMB * (kind == "lamb"):
        said = re.escape(f"{name}={value!r} is out of range; choose ")
        with pytest.raises(gradwire.ConfigurationError, match=said):
            made(kind, net, **({name: value} if dist.get_rank() else {}))
    with pytest.raises(gradwire.ConfigurationError, match="rank 0 has 'broadcast=True', rank 1 has 'broadcast=False'"):
        made(kind, net, broadcast=dist.get_rank() == 0)
    assert torch.equal(flat(net), before)


@pytest.mark.parametrize("kind", list(KINDS))
@ranks(2)
def test_numbers_of_any_library_are_the_same(kind: str) -> None:
    net = network()
    whole, share = (np.int64, np.float64) if dist.get_rank() else (int, float)
    options: dict[str, Any] = {"betas": [share(0.8), share(0.9)], "eps": share(1e-6), "weight_decay": share(0.5)}
    options |= {"freeze_step": whole(2), "lr": share(0.01), "seed": whole(3)}
    if kind == "lamb":
        options |= {"trust": (share(0.5), share(2)), "change": share(0.5)}
    optimizer = made(kind, net, **options)
    for step in range(4):
        backward(net, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    optimizer.close()


@pytest.mark.parametrize("name", ["maximize", "amsgrad"])
def test_what_only_torchs_adam_takes_of_a_group_is_told(name: str) -> None:
    """It would be left out without a word: a group that is to go up would go down."""
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "floor": 0.1}
    make_valid({**group, name: False, "initial_lr": 0.1})
    with pytest.raises(gradwire.ConfigurationError, match=f"{name}=True of a group is no option of these optimizers"):
        make_valid({**group, name: True})


@pytest.mark.parametrize("kind", list(KINDS))
@ranks(2)
def test_steps_that_are_compiled_are_the_same_and_count(kind: str) -> None:
    """Alone, and within what is compiled as a whole."""
    found = []
    for wrap in (lambda step: step, lambda step: torch.compile(step, backend="eager")):
        net = network()
        optimizer = made(kind, net)

        def whole(number: int, net: nn.Module = net, optimizer: CompressedAdam = optimizer) -> None:
            backward(net, number)
            optimizer.step()

        alone, together = wrap(optimizer.step), wrap(whole)
        for number in range(8):
            backward(net, number)
            alone()
        for number in range(8, 12):
            together(number)
        meet(optimizer)
        found.append((flat(net), optimizer.steps, optimizer.stats().wire_bytes))
        optimizer.close()
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
    assert found[0][1] == 12


@pytest.mark.parametrize("kind", list(KINDS))
@ranks(2)
def test_a_coordinate_whose_variance_has_overflowed_stands_still_alone(kind: str) -> None:
    net = network()
    optimizer = made(kind, net, floor=0.0, freeze_step=3, method="dense")
    for step in range(8):
        backward(net, step)
        if step == 1:
            net[0].weight.grad[0, 0] = 3e38
        before = flat(net)
        optimizer.step()
        meet(optimizer)
        moved = flat(net) != before
        if step > 3:
            assert not moved[0]
            assert moved[1 : net[0].weight.numel()].float().mean() > 0.9
    optimizer.close()
