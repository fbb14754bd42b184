"""The laws of the catalogue, of every method, on two replicas of two shards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from catalogue import Case, cases
from flat_world import ROUNDING
from gradwire import methods
from gradwire.layout import ALIGNMENT, shard_bounds
from pool import Pool
from sharded import hsdp, hybrid, loss, parts, replicas, same_on_replicas

STEPS = range(3)
REPLICAS = 2
DENSE = gradwire.DensePolicy(below=200)

WITH_RESIDUAL = list({(case.method, case.route): case for case in reversed(cases("residual"))}.values())
"""Each method's first attachment with error feedback, on each of its routes."""

OTHERS = [
    case
    for case in {case.method: case for case in reversed(cases())}.values()
    if case.method not in {each.method for each in WITH_RESIDUAL}
]
"""Those that carry another memory, or none."""


@pytest.fixture
def pool() -> Iterator[Pool]:
    """Processes of its own for each test: a world in which others ran before has been seen to wait for ever."""
    workers = Pool()
    yield workers
    workers.close()


def gradients(model: Any, step: int) -> list[Tensor]:
    """Of about one, as float64: what this rank has of each parameter's."""
    model.zero_grad()
    (1000 * loss(model, step)).backward()
    return [each.grad.to_local().double() for each in model.parameters()]


def largest(tensor: Tensor) -> float:
    """Magnitude; 0 where a rank has nothing of a parameter."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def averaged(tensors: list[Tensor]) -> list[Tensor]:
    """The means over the replicas of this rank's shard."""
    flat = torch.cat([each.flatten() for each in tensors])
    dist.all_reduce(flat, group=replicas())
    means = (flat / REPLICAS).split([each.numel() for each in tensors])
    return [mean.view_as(each) for mean, each in zip(means, tensors, strict=True)]


def owed(handle: gradwire.Handle, case: Case, names: list[str]) -> list[Tensor]:
    """What compression has not sent: the mean of workers' residuals, and what owners kept back."""
    found, kept_as = [], handle.state_dict()["tensors"]
    for name in names:
        shape = handle.averaged.shapes[name]
        mine = torch.zeros(math.prod(shape), dtype=torch.float64)
        if (kept := kept_as.get("residual", {}).get(name)) is not None:
            mine += kept.flatten()
        if (kept := kept_as.get("owner_residual", {}).get(name)) is not None and case.route == "gather":
            mine += kept.flatten()
        elif kept is not None:
            (rule,) = handle.configuration.rules
            unit = rule.granularity.unit(shape) or ALIGNMENT
            low, high = shard_bounds(mine.numel(), handle.engine.rank, REPLICAS, unit)
            mine[low:high] += REPLICAS * kept.flatten()[: high - low]
        found.append(mine.view(shape))
    return averaged(found)


def add_up() -> None:
    put_in = [averaged(gradients(hsdp(mesh=hybrid()["shard"]), step)) for step in STEPS]
    assert max(map(largest, put_in[0])) > 0.5
    for case in WITH_RESIDUAL:
        model = hsdp()
        names = [name for name, _ in model.named_parameters()]
        with closing(gradwire.compress(model, case.method, **case.arguments, dense=DENSE)) as handle:
            rest = [torch.zeros_like(each) for each in put_in[0]]
            for step in STEPS:
                came, before = gradients(model, step), rest
                assert same_on_replicas(came), (str(case), step)
                rest = owed(handle, case, names)
                for name, average, mean, old, new in zip(names, came, put_in[step], before, rest, strict=True):
                    scale = 1 + max(map(largest, (average, mean, new)))
                    off = largest(mean + old - new - average)
                    assert off < ROUNDING.get(case.method, 1e-5) * scale, (str(case), name, step, off)
            assert any(bool(each.any()) for each in rest) or case.method in EXACT, str(case)


EXACT = ("dense",)
"""Methods that owe nothing."""


def test_average_plus_residual_is_the_mean_of_what_was_put_in(pool: Pool) -> None:
    """Of each step, over the replicas of every shard; and replicas have the same bits."""
    pool.run(4, add_up)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.last = nn.Linear(48, 40), nn.Linear(48, 40), nn.Linear(40, 5)
        self.taken = self.first

    def forward(self, inputs: Tensor) -> Any:
        return self.last(self.taken(inputs))


def wait() -> None:
    model = hsdp(Branches())
    names = [name for name, _ in model.named_parameters()]
    case = Case("subspace", {"bits": 0.5}, "model", "gather", "residual")
    with closing(gradwire.compress(model, case.method, **case.arguments)) as handle:
        for step in range(2):
            gradients_of(model, step)
        before = owed(handle, case, names)
        assert any(each.any() for each in before[:2])
        model.taken = model.second
        came = gradients_of(model, 2)
        assert [name for name in names if name not in came] == ["first.weight", "first.bias"]
        for waiting, kept in zip(owed(handle, case, names)[:2], before[:2], strict=True):
            torch.testing.assert_close(waiting, kept, rtol=1e-5, atol=1e-6)
        replica = hybrid()["replicate"].get_local_rank()
        model.taken = (model.first, model.second)[replica]
        came = gradients_of(model, 3)
        assert list(came) == names
        assert all(each.any() for each in came.values())
        assert same_on_replicas(list(came.values()))


def gradients_of(model: Any, step: int) -> dict[str, Tensor]:
    model.zero_grad()
    (1000 * loss(model, step)).backward()
    return {name: each.grad.to_local() for name, each in model.named_parameters() if each.grad is not None}


def test_what_is_owed_to_a_group_waits_until_a_replica_uses_it(pool: Pool) -> None:
    """Where a model is averaged at once, groups that take no part are left alone, and one that does is everybody's."""
    pool.run(4, wait)


def agree() -> None:
    for case in OTHERS:
        model = hsdp()
        with closing(gradwire.compress(model, case.method, **case.arguments, dense=DENSE)):
            for step in STEPS:
                came = gradients(model, step)
                assert same_on_replicas(came), (str(case), step)
                assert all(bool(each.isfinite().all()) for each in came), (str(case), step)
        assert [each.shape for each in parts(model)] == [each.shape for each in came]


def test_replicas_have_the_same_bits_whatever_the_method(pool: Pool) -> None:
    """Of those that cannot carry error feedback; together they are the catalogue."""
    assert {case.method for case in WITH_RESIDUAL} | {case.method for case in OTHERS} == set(methods.names())
    pool.run(4, agree)
