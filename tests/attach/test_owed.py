"""What compression owes goes on where the model is cut in another way."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import ConfigurationError
from gradwire.memory import Kind
from pool import Pool, ranks
from sharded import Net, hsdp, in_four, loss, replicated, train

ALL = gradwire.DensePolicy(below=0, vectors=False)


def elsewhere(folder: str, method: str, options: dict[str, Any]) -> None:
    """A step without gradients brings what is owed, and nothing else, to models cut otherwise or not at all."""
    from torch.distributed.tensor import DTensor

    model = hsdp()
    with closing(gradwire.compress(model, method, dense=ALL, **options)) as handle:
        train(model, range(3))
        owed = gradwire.Owed(handle, model)
        expected = {name: each.full_tensor() for name, each in owed.state_dict().items() if isinstance(each, DTensor)}
        assert not owed.state_dict()["which are estimates"].any()
        assert any(each.any() for each in expected.values())
        dcp.save({"owed": owed}, checkpoint_id=folder)
    others: list[Any] = [hsdp(), hsdp(mesh=in_four()), replicated(), DistributedDataParallel(Net())]
    for other in others:
        with closing(gradwire.compress(other, "dense")) as handle:
            dcp.load({"owed": gradwire.Owed(handle, other)}, checkpoint_id=folder)
            (0 * loss(other, 0)).backward()
            for name, each in other.named_parameters():
                assert each.grad is not None
                found = each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
                assert torch.allclose(found, expected[name.removeprefix("module.")], rtol=1e-5, atol=1e-7), name
            other.zero_grad()
            (0 * loss(other, 0)).backward()
            assert not any(bool(each.grad.norm()) for each in other.parameters() if each.grad is not None)


@pytest.mark.parametrize(
    ("method", "options"), [("topk", {"ratio": 0.05}), ("acpsgd", {"rank": 1}), ("efsignsgd", {"route": "sharded"})]
)
def test_what_is_owed_goes_to_another_cut(pool: Pool, tmp_path: Path, method: str, options: dict[str, Any]) -> None:
    pool.run(4, elsewhere, str(tmp_path), method, options)


def full(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def kept(handle: gradwire.Handle, place: int) -> dict[str, torch.Tensor]:
    """What a memory of differences has in one of its fields: the worker's estimate, negative, or the shared one."""
    found = {}
    for name, shape in handle.averaged.shapes.items():
        fields = handle.configuration.rule(name).memory_of(shape).estimates("residual")
        assert fields is not None
        value = handle.engine.store.get(fields[place], name)
        found[name] = torch.zeros(shape) if value is None else value
    return found


def estimates_elsewhere(folder: str, method: str, options: dict[str, Any]) -> None:
    """All know the same, and it is the mean of the workers' estimates, under any cut; and the next step goes on."""
    model = hsdp()
    with closing(gradwire.compress(model, method, dense=ALL, **options)) as handle:
        train(model, range(3))
        owed = gradwire.Owed(handle, model)
        saved = {name: full(each) for name, each in owed.state_dict().items()}
        assert saved.pop("which are estimates").all()
        parts = handle.engine.store.get("residual.estimate", "second.0.weight")
        assert parts is not None
        assert parts.any()
        dcp.save({"owed": owed}, checkpoint_id=folder)
    others: list[Any] = [hsdp(), replicated(), DistributedDataParallel(Net())]
    for other in others:
        with closing(gradwire.compress(other, method, dense=ALL, **options)) as handle:
            dcp.load({"owed": gradwire.Owed(handle, other)}, checkpoint_id=folder)
            again = gradwire.Owed(handle, other).state_dict()
            assert all(torch.equal(full(again[name]), each) for name, each in saved.items())
            for step in range(3):
                shared, own = kept(handle, 1), kept(handle, 0)
                group = handle._transport
                for name, each in own.items():
                    mean = each.clone()
                    group.all_reduce(mean, dist.ReduceOp.SUM)()
                    mean /= -group.world_size
                    assert torch.allclose(mean, shared[name], rtol=1e-5, atol=1e-6), (step, name)
                    others_have = shared[name].clone()
                    group.all_reduce(others_have, dist.ReduceOp.MAX)()
                    assert torch.equal(others_have, shared[name]), (step, name)
                (0 * loss(other, 0)).backward()
                if method == "ef21" and not step:  # what is sent of a difference to nothing takes some of it away
                    for name, each in other.named_parameters():
                        assert each.grad is not None
                        grad, before = full(each.grad), saved[name.removeprefix("module.")]
                        left = grad != 0
                        assert torch.equal(grad[left], before[left]), name
                        assert bool(left.any()) == bool(before.any()), name
                other.zero_grad()
    other = hsdp()
    with closing(gradwire.compress(other, "topk", dense=ALL)) as handle:  # which has no estimates
        dcp.load({"owed": gradwire.Owed(handle, other)}, checkpoint_id=folder)
        (0 * loss(other, 0)).backward()
        assert not any(bool(full(each.grad).norm()) for each in other.parameters() if each.grad is not None)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("ef21", {"ratio": 0.2}),
        ("qsgd", {"memory": "diana", "route": "gather"}),
        ("efsignsgd", {"memory": "ef21", "route": "sharded"}),
    ],
)
def test_estimates_go_to_another_cut(pool: Pool, tmp_path: Path, method: str, options: dict[str, Any]) -> None:
    pool.run(4, estimates_elsewhere, str(tmp_path), method, options)


@ranks(4)
def test_estimates_of_nodes() -> None:
    """Each worker of a node knows its own rows; what is saved is all of them."""
    model: Any = DistributedDataParallel(Net())
    with closing(gradwire.compress(model, "ef21", ratio=0.2, dense=ALL, inside=2)) as handle:
        train(model, range(3))
        saved = gradwire.Owed(handle, model).state_dict()
        average = {name: each.grad for name, each in model.module.named_parameters()}
        assert all(torch.allclose(each, saved[name], atol=1e-7) for name, each in average.items() if each is not None)
        gradwire.Owed(handle, model).load_state_dict(saved)
        again = gradwire.Owed(handle, model).state_dict()
        assert all(torch.equal(each, again[name]) for name, each in saved.items())
    model = DistributedDataParallel(Net())
    with closing(gradwire.compress(model, "ef21", ratio=0.2, dense=ALL)) as handle:
        gradwire.Owed(handle, model).load_state_dict(saved)
        again = gradwire.Owed(handle, model).state_dict()
        assert all(torch.equal(each, again[name]) for name, each in saved.items())
        gradwire.Owed(handle, model).load_state_dict({**saved, "which are estimates": saved["which are estimates"] < 0})
        with pytest.raises(gradwire.GradwireError, match="is owed what the next step takes along, and memory=ef21"):
            gradwire.Owed(handle, model).state_dict()


@ranks(2)
def test_what_is_owed_is_weighed_by_the_rate_that_it_was_owed_at() -> None:
    """Applied and owed add up to the updates due where the rate changed in between; without a rate, to the sums."""
    current = [0.1]
    weighed: dict[str, Any] = {"ratio": 0.05, "dense": ALL, "learning_rate": lambda: current[0]}
    plain: dict[str, Any] = {"ratio": 0.05, "dense": ALL}
    model: Any = DistributedDataParallel(Net())
    with closing(gradwire.compress(model, "topk", **weighed)) as handle:
        loss(model, 0).backward()
        saved = gradwire.Owed(handle, model).state_dict()
    for rate, options, share in ((0.01, weighed, 10.0), (0.4, weighed, 0.25), (0.4, plain, 1.0)):
        current[0] = rate
        model = DistributedDataParallel(Net())
        with closing(gradwire.compress(model, "topk", **options)) as handle:
            gradwire.Owed(handle, model).load_state_dict(saved)
            again = gradwire.Owed(handle, model).state_dict()
            assert all(torch.equal(again[name], saved[name]) for name in handle.averaged.shapes)
            (0 * loss(model, 0)).backward()
            owed = gradwire.Owed(handle, model).state_dict()
            for name, each in model.module.named_parameters():
                assert saved[name].any()
                torch.testing.assert_close(each.grad + owed[name], share * saved[name], rtol=1e-5, atol=1e-6)


@ranks(2)
def test_a_step_that_is_not_finite_does_not_take_what_is_owed() -> None:
    """Nobody takes such an average, and no memory takes in such a gradient, so it waits for the next step."""
    cases = [("dense", (1,)), ("dense", (0, 1)), ("topk:ratio=0.05", (0, 1)), ("efsignsgd:route=sharded", (0, 1))]
    for method, bad in cases:
        parameter = torch.nn.Parameter(torch.zeros(40, 50))
        named = [("weight", parameter)]
        with closing(gradwire.Synchronizer(named, method, dense=ALL)) as sync:
            owed = torch.randn(40, 50, generator=torch.Generator().manual_seed(dist.get_rank()))
            sync.engine.store.put("owed", "weight", owed, Kind.MEAN)
            expected = owed.clone()
            dist.all_reduce(expected)
            came = torch.zeros(40, 50)
            for step in range(4):
                parameter.grad = torch.zeros(40, 50)
                if step in (0, 2) and dist.get_rank() in bad:
                    parameter.grad += torch.nan
                sync.synchronize()
                if step in (0, 2):
                    assert not parameter.grad.isfinite().all()
                else:
                    came += parameter.grad
                    assert sync.engine.store.get("owed", "weight") is None
            module = torch.nn.Module()
            module.register_parameter("weight", parameter)
            still = gradwire.Owed(sync, module).state_dict()["weight"]
            torch.testing.assert_close(came + still, expected / 2, rtol=1e-4, atol=1e-5, msg=f"{method} {bad}")


@ranks(2)
def test_another_model_is_told() -> None:
    model = DistributedDataParallel(Net())
    with closing(gradwire.compress(model, "topk")) as handle:
        with pytest.raises(ConfigurationError, match="the model has no parameter"):
            gradwire.Owed(handle, torch.nn.Linear(3, 3))
        owed = gradwire.Owed(handle, model)
        state = owed.state_dict()
        with pytest.raises(ConfigurationError, match=r"nothing owed to 'last.bias' of shape \(5,\)"):
            owed.load_state_dict({**state, "last.bias": torch.zeros(4)})
        for key in ("which are estimates", "weighed at rates"):
            with pytest.raises(ConfigurationError, match=f"the state does not say {key!r}"):
                owed.load_state_dict({name: each for name, each in state.items() if name != key})
        assert dist.get_world_size() == 2
