"""Residuals in bfloat16: half the size, and nothing lost but roundings."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_memories import SHAPE, gradient

import gradwire
from gradwire import memory
from gradwire.attach import buckets
from gradwire.kernels import cpu, reference
from gradwire.layout import Block, Granularity, flat_slots
from gradwire.memory import Store
from pool import Pool, ranks

HALF = memory.Residual(dtype="bfloat16")


def test_narrowing_is_exact_on_average_and_never_off_by_more_than_a_unit() -> None:
    """The mean of 400 draws is within 5 standard errors along the values themselves; each lies beside its value."""
    block, values = Block.cut(flat_slots([("weight", SHAPE)]), Granularity("layer")), gradient(0).flatten()
    values[:4] = torch.tensor([0.0, torch.finfo(torch.float32).max, 1e-40, -1.5])
    draws = torch.empty(400, 2000)
    unit = (values.bfloat16().float().abs() * 2.0**-7).clamp(min=2.0**-133)
    for key in range(400):
        kept, other = (torch.empty(2000, dtype=torch.bfloat16) for _ in range(2))
        cpu.narrow(block, values, kept, key)
        reference.narrow(block, values, other, key)
        assert torch.equal(kept.view(torch.int16), other.view(torch.int16))
        draws[key] = kept.float()
    assert draws.isfinite().all()
    assert ((draws - values).abs() <= unit).all()
    assert (draws[:, 3] == -1.5).all(), "what fits is not changed"
    error, variance = (draws[:, 4:].double().mean(0) - values[4:]), draws[:, 4:].double().var(0) / 400
    assert (error * values[4:]).sum().abs() <= 5 * (variance * values[4:].square()).sum().sqrt()
    assert 0.75 <= error.square().sum() / variance.sum() <= 1.25


@ranks(1)
def test_a_residual_of_half_the_size_loses_nothing_but_roundings() -> None:
    """Average and memory add up to what was put in, within a unit in the last place of bfloat16 a step."""
    for method, options in [*HALVED, *WAITING]:
        named = [(name, torch.nn.Parameter(torch.zeros(SHAPE))) for name in ("first", "second")]
        usual, buckets.BUCKET_ELEMENTS = buckets.BUCKET_ELEMENTS, 1000
        sync = gradwire.Synchronizer(named, method, memory=HALF, rollback=True, **options)
        buckets.BUCKET_ELEMENTS = usual
        total, allowed = torch.zeros(2, *SHAPE), torch.zeros(2, *SHAPE)
        for step in range(6):
            before = sync.state_dict()["tensors"]
            for number, (_, parameter) in enumerate(named):
                parameter.grad = gradient(dist.get_rank(), 2 * step + number)
                if step == 3:
                    parameter.grad[7, 7] = torch.nan
            sync.synchronize()
            after = sync.state_dict()["tensors"]
            if step == 3:
                for field, tensors in before.items():
                    assert all(torch.equal(tensor, after[field][name]) for name, tensor in tensors.items()), method
                continue
            for number, (name, parameter) in enumerate(named):
                total[number] += gradient(0, 2 * step + number) - parameter.grad
                kept = after["residual"][name]
                assert kept.dtype == torch.bfloat16
                allowed[number] += 2.0**-7 * kept.abs() + 1e-5
                if (method, options) in WAITING:
                    waiting = before["residual"][name].float() if step else 0
                    allowed[number] += 2.0**-7 * (gradient(0, 2 * step + number) + waiting).abs()
        kept = torch.stack([after["residual"][name].float() for name, _ in named])
        assert ((total - kept).abs() <= allowed).all(), method
        sync.close()


HALVED: list[tuple[str, dict[str, object]]] = [
    ("efsignsgd", {"route": "gather"}),
    ("topk", {"ratio": 0.1, "route": "gather"}),
    ("qsgd", {"bits": 4, "route": "gather"}),
    ("threshold", {"threshold": 1.0}),
    ("randomk", {"ratio": 0.1}),
    ("bf16", {}),
]

WAITING: list[tuple[str, dict[str, object]]] = [
    ("powersgd", {"rank": 2}),
    ("acpsgd", {"rank": 2, "bits": 16}),
    ("globalqsgd", {"bits": 8}),
    ("gtopk", {"ratio": 0.1}),
    ("oktopk", {"ratio": 0.1}),
    ("scalecom", {"ratio": 0.1}),
    ("sketchedsgd", {}),
    ("thc", {}),
]
"""Methods that wait for others between the first and the last that they do with what they remember."""


def owners_in_half() -> list[bytes]:
    """With owners, all residuals together make up for what was not applied, within a unit a step."""
    found = []
    for method in ("efsignsgd", "topk"):
        parameter = torch.nn.Parameter(torch.zeros(SHAPE))
        sync = gradwire.Synchronizer([("weight", parameter)], method, memory=HALF, route="sharded")
        owed, allowed = torch.zeros(2000), torch.full((2000,), 1e-4)
        for step in range(6):
            parameter.grad = gradient(dist.get_rank(), step)
            sync.synchronize()
            found.append(parameter.grad.numpy().tobytes())
            owed += ((gradient(0, step) + gradient(1, step)) / 2 - parameter.grad).flatten()
            tensors = sync.state_dict()["tensors"]
            kept = tensors["residual"]["weight"].flatten() / 2
            kept[1000 * dist.get_rank() :][:1000] += tensors["owner_residual"]["weight"]
            spread = kept.abs()
            dist.all_reduce(kept)
            dist.all_reduce(spread)
            allowed += 2.0**-6 * spread
        assert ((owed - kept).abs() <= allowed).all(), method
        sync.close()
    return found


def test_ranks_agree_with_residuals_of_half_the_size(pool: Pool) -> None:
    first, second = pool.run(2, owners_in_half)
    assert first == second


@ranks(2)
def test_buckets_may_be_larger_than_those_before_them() -> None:
    """DDP forms several at once where parameters may be unused, and kernels have read the first before the next."""
    for method, options in (("topk", {"memory": HALF}), ("lion", {})):
        net = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.Linear(100, 20))
        model = torch.nn.parallel.DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=0.001)
        handle = gradwire.compress(model, method, **options)
        model(gradient(dist.get_rank()).view(-1)[:640].view(10, 64)).square().sum().backward()
        assert len(handle.buckets) > 1
        assert all(each.grad is not None and each.grad.any() for each in net.parameters())
        handle.close()


@ranks(2)
def test_buckets_borrow_no_more_than_they_need() -> None:
    """DDP forms several of the one that its first step has, and then no room is kept for a whole model."""
    net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001)
    handle = gradwire.compress(model, "topk", memory=HALF)
    rooms = []
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
        rooms.append(
            handle.engine.store.scratch(0).untyped_storage().nbytes() / sum(each.nbytes for each in net.parameters())
        )
    assert len(handle.buckets) == 8
    assert rooms[0] > 0.9
    assert rooms[2] < 0.3
    handle.close()


def test_half_a_residual_has_one_dtype() -> None:
    with pytest.raises(gradwire.ConfigurationError, match="dtype='int8' is not possible; choose 'float32' or"):
        memory.Residual(dtype="int8")


def test_half_a_residual_takes_half_the_memory() -> None:
    store = Store(torch.device("cpu"))
    slots = [flat_slots([(str(number), (1000,))]) for number in range(8)]
    feedbacks = [HALF.feedback(store, "residual", each, 1000) for each in slots]
    assert sum(buffer.nbytes for buffer in store.buffers()) == 8 * (2 * 1000 + 8)
    addresses = {each.residual.data_ptr() for each in feedbacks if each.residual is not None}
    assert len(addresses) == 1, "all buckets share one scratch buffer"
