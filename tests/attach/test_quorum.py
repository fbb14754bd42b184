"""Averages among workers who come and go: what those who stay owe is conserved, a step not taken leaves nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from gradwire.attach.quorum import Averages
from gradwire.engine.change import owed_of
from gradwire.errors import ConfigurationError
from gradwire.layout import Slot
from models import SHAPES, gathered, gradient, parameters
from pool import Pool

METHODS = [
    ("topk", {"ratio": 0.05}),
    ("topk", {"ratio": 0.05, "route": "sharded"}),
    ("efsignsgd", {}),
    ("acpsgd", {"rank": 2}),
    ("powersgd", {"rank": 2}),
]


def unknown_group(ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """A group of some ranks that torch keeps no record of, as torchft makes at every quorum."""
    store = dist.PrefixStore(name, distributed_c10d._get_default_store())
    place, limit = ranks.index(dist.get_rank()), timedelta(seconds=30)
    group = dist.ProcessGroup(store, place, len(ranks))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = dist.ProcessGroupGloo(store, place, len(ranks), limit)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def fresh_name() -> str:
    """The same on all ranks, and another one every time: a store keeps the addresses of groups that are no more."""
    names = [uuid4().hex]
    dist.broadcast_object_list(names)
    return names[0]


class Worker:
    """Averages of gradients that follow from rank and step."""

    def __init__(self, method: str, options: dict[str, Any]) -> None:
        self.parameters = parameters()
        self.averages = Averages(method, options, self.parameters)

    def step(self, number: int, takes_part: bool = True) -> Tensor:
        """The average, flat."""
        for name, each in self.parameters:
            each.grad = gradient(name, dist.get_rank(), number)
        self.averages.synchronize(takes_part)
        return torch.cat([each.grad.view(-1) for _, each in self.parameters if each.grad is not None])

    def meet(self, group: dist.ProcessGroup, share: int, step: int) -> None:
        self.averages.meet(group, share, step, timedelta(seconds=30))

    def owed(self) -> Tensor:
        engine = self.averages.engine
        found = []
        for name, shape in SHAPES.items():
            rule = engine.now.rule(name)
            each = owed_of(engine.store, Slot(name, shape, 0), rule, engine.rank, engine.world_size, None)
            found.append(torch.zeros(shape) if each is None else each)
        return torch.cat([each.reshape(-1) for each in found])


def gradients(number: int) -> Tensor:
    return torch.cat([gradient(name, dist.get_rank(), number).view(-1) for name in SHAPES])


def mean(tensor: Tensor, ranks: Sequence[int]) -> Tensor:
    everyone = gathered(tensor)
    return torch.stack([everyone[rank] for rank in ranks]).double().mean(0)


def some_leave_and_come(method: str, options: dict[str, Any]) -> None:
    """Three, then two of them, then three again, of whom the one that came takes no part in its first step."""
    rank, worker, name = dist.get_rank(), Worker(method, options), fresh_name()
    worker.meet(unknown_group(range(3), f"{name} first"), 3, 0)
    worker.step(0)
    worker.meet(worker.averages._group, 3, 1)  # type: ignore[arg-type]
    worker.step(1)
    before = mean(worker.owed(), (0, 1)) * 2 / 3  # of what three workers owe, those two's
    if rank < 2:
        worker.meet(unknown_group(range(2), f"{name} second"), 2, 2)
    after = mean(worker.owed(), (0, 1))
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)
    average = worker.step(2) if rank < 2 else torch.zeros_like(gradients(2))
    left = mean(worker.owed(), (0, 1))
    if rank < 2:
        assert torch.equal(*gathered_among(average))
    torch.testing.assert_close(mean(average, (0, 1)) + left, mean(gradients(2), (0, 1)) + after, rtol=1e-5, atol=2e-5)
    if rank == 2:
        worker = Worker(method, options)  # a new process, that has taken over the model
        worker.averages.heal()
    worker.meet(unknown_group(range(3), f"{name} third"), 2, 3)
    owed = mean(worker.owed(), (0, 1))
    torch.testing.assert_close(owed, left, rtol=1e-6, atol=1e-6)
    average = worker.step(3, takes_part=rank < 2)
    assert all(torch.equal(each, average) for each in gathered(average))
    left = mean(worker.owed(), range(3)) * 3 / 2  # what an owner did not send counts wherever it is
    torch.testing.assert_close(average.double() + left, mean(gradients(3), (0, 1)) + owed, rtol=1e-5, atol=2e-5)
    worker.meet(worker.averages._group, 3, 4)  # type: ignore[arg-type]
    torch.testing.assert_close(mean(worker.owed(), range(3)), left, rtol=1e-6, atol=1e-6)
    worker.averages.close()


def gathered_among(tensor: Tensor) -> list[Tensor]:
    """Of ranks 0 and 1."""
    found = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(found, tensor, group=dist.new_group([0, 1], use_local_synchronization=True))
    return found


@pytest.mark.parametrize(("method", "options"), METHODS)
def test_what_those_who_stay_owe_is_conserved(pool: Pool, method: str, options: Any) -> None:
    pool.run(3, some_leave_and_come, method, options)


def frozen_later(method: str, options: dict[str, Any]) -> None:
    """What is frozen stays where it is, and what is owed to it waits."""
    worker = Worker(method, options)
    group, frozen = unknown_group(range(2), fresh_name()), dict(worker.parameters)["linear"]
    for number in range(4):
        worker.meet(group, 2, number)
        owed = mean(worker.owed(), range(2))
        frozen.requires_grad_(number != 2)
        for name, each in worker.parameters:
            each.grad = gradient(name, dist.get_rank(), number) if each.requires_grad else None
        worker.averages.synchronize(True)
        assert (frozen.grad is None) == (number == 2)
        if number == 2:
            first, left = math.prod(SHAPES["conv"]), mean(worker.owed(), range(2))
            of_frozen = slice(first, first + frozen.numel())
            torch.testing.assert_close(left[of_frozen], owed[of_frozen], rtol=1e-5, atol=2e-5)
    worker.averages.close()


@pytest.mark.parametrize(("method", "options"), METHODS)
def test_what_is_frozen_later_is_left_alone(pool: Pool, method: str, options: Any) -> None:
    pool.run(2, frozen_later, method, options)


def not_taken(method: str, options: dict[str, Any]) -> None:
    """A step that is not committed, after which all go on in a new group; and one as if it had not been."""
    worker, other, fresh = Worker(method, options), Worker(method, options), fresh_name()
    for each, name in ((worker, "first"), (other, "other")):
        each.meet(unknown_group(range(2), f"{fresh} {name}"), 2, 0)
        each.step(0)
    worker.meet(worker.averages._group, 2, 1)  # type: ignore[arg-type]
    worker.step(5)
    for each, name in ((worker, "second"), (other, "another")):
        each.meet(unknown_group(range(2), f"{fresh} {name}"), 2, 1)
    assert torch.equal(worker.owed(), other.owed())
    assert torch.equal(worker.step(1), other.step(1))
    worker.averages.close()
    other.averages.close()


@pytest.mark.parametrize(("method", "options"), [*METHODS, ("ef21", {}), ("qsgd", {})])
def test_a_step_that_is_not_taken_leaves_nothing(pool: Pool, method: str, options: Any) -> None:
    pool.run(2, not_taken, method, options)


def spikes_are_known() -> None:
    """What is usual of a worker's gradients is so in every group that it goes on in."""
    clipped, plain, name = Worker("dense", {"clip_spikes": 4}), Worker("dense", {}), fresh_name()
    for number in range(24):
        for worker, group in ((clipped, "clipped"), (plain, "plain")):
            first = number % 12 == 0
            met = unknown_group(range(2), f"{name} {group} {number}") if first else worker.averages._group
            worker.meet(met, 2, number)  # type: ignore[arg-type]
        assert torch.equal(clipped.step(number), plain.step(number)), number
    clipped.meet(unknown_group(range(2), f"{name} last"), 2, 24)
    for each, values in clipped.parameters:
        values.grad = 100 * gradient(each, dist.get_rank(), 24)
    clipped.averages.synchronize(True)
    plain.meet(plain.averages._group, 2, 24)  # type: ignore[arg-type]
    plain.step(24)
    found = [torch.cat([values.grad.view(-1) for _, values in each.parameters]) for each in (clipped, plain)]
    assert found[0].norm() < 10 * found[1].norm()
    clipped.averages.close()
    plain.averages.close()


def test_what_is_usual_stays_so_in_other_groups(pool: Pool) -> None:
    pool.run(2, spikes_are_known)


def test_what_goes_by_parameter_needs_parameters() -> None:
    for choices in ({"rollback": True}, {"clip_spikes": 4}, {"audit_every": 1}):
        with pytest.raises(ConfigurationError, match="has no names; give parameters=model"):
            Averages("qsgd", choices, None)


def groups_that_differ() -> None:
    worker = Worker("topk", {"ratio": 0.05 if dist.get_rank() else 0.1})
    with pytest.raises(ConfigurationError, match=r"ranks differ: rank 0 has 'ratio=0.1', rank 1 has 'ratio=0.05'"):
        worker.meet(unknown_group(range(2), "unlike"), 2, 0)


def test_groups_that_differ_say_so(pool: Pool) -> None:
    pool.run(2, groups_that_differ)


def parameters_that_change() -> None:
    net = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 8))
    net[1].requires_grad_(False)
    averages = Averages("topk", {"ratio": 0.05}, net)
    averages.meet(unknown_group(range(2), "parameters"), 2, 0, timedelta(seconds=30))
    net[1].requires_grad_(True)
    with pytest.raises(ConfigurationError, match=r"'1.weight' was frozen when the method was attached"):
        averages.synchronize(True)
    net[1].requires_grad_(False)
    net[1] = nn.Linear(50, 8)
    with pytest.raises(ConfigurationError, match=r"parameter '1.weight' is another one since"):
        averages.synchronize(True)
    averages.close()


def test_parameters_that_change_are_told(pool: Pool) -> None:
    pool.run(2, parameters_that_change)
