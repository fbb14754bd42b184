"""The way in for DDP: real backward passes, several buckets, rebuilt ones."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from catalogue import Case, cases
from gradwire import methods
from gradwire.wire import ProcessGroupTransport
from gradwire.wire.transport import timeout_of
from models import batch, flat, network
from pool import Pool, ranks

WAYS = ("gradient_as_bucket_view", "find_unused_parameters", "static_graph")


def train(model: DistributedDataParallel, steps: range, lr: float = 0.05) -> list[torch.Tensor]:
    """Plain SGD; returns the gradients of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in steps:
        inputs, labels = batch(dist.get_rank(), step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def eight_steps(chosen: list[Case], **ddp: Any) -> dict[str, bytes]:
    digests = {}
    for case in chosen:
        # Buckets of 20 kB: three of them, and another order once DDP has seen one backward pass.
        model = DistributedDataParallel(network(), bucket_cap_mb=0.02, **ddp)
        handle = gradwire.compress(model, case.method, **case.arguments)
        train(model, range(8))
        assert handle.stats().steps == 8
        assert flat(model).isfinite().all(), case
        digests[str(case)] = flat(model).numpy().tobytes()
        handle.close()
    return digests


USUAL = [case for case in cases() if case.memory == methods.get(case.method).memory and case.granularity != "block:96"]
CHOSEN = [
    own[number % len(own)]  # one of each method, on another route or granularity than the last one
    for number, name in enumerate(methods.names())
    for own in [[case for case in USUAL if case.method == name]]
]


@pytest.mark.parametrize("workers", [2, 4])
def test_ranks_stay_bit_identical_through_bucket_rebuilds(pool: Pool, workers: int) -> None:
    first, *others = pool.run(workers, eight_steps, CHOSEN)
    for other in others:
        assert other == first


@ranks(3)
def test_dense_is_ddp() -> None:
    ours = DistributedDataParallel(network(), bucket_cap_mb=0.02)
    theirs = DistributedDataParallel(network(), bucket_cap_mb=0.02)
    gradwire.compress(ours, "dense")
    for mine, reference in zip(train(ours, range(5)), train(theirs, range(5)), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-7)


@ranks(2)
def test_training_does_not_depend_on_buckets() -> None:
    """State is kept by name: buckets of any size give the same training."""
    results = []
    for cap in (0.02, 25.0):
        model = DistributedDataParallel(network(), bucket_cap_mb=cap)
        handle = gradwire.compress(model, "efsignsgd")
        train(model, range(10))
        results.append(flat(model))
        handle.close()
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-5)


@ranks(2)
def test_a_whole_model_has_the_same_bits_in_any_buckets() -> None:
    """Its buffer is laid out as DDP's buckets come, which are final after a few steps; averages stay where they lie."""
    guards = {"rollback": True, "verify_every": 1, "audit_every": 2, "learning_rate": lambda: 0.05, "clip_spikes": 4}
    for method in ("subspace:bits=2", "deadzone:bits=0.5", "topk:ratio=0.05,granularity=model"):
        results = []
        for cap, ddp in ((25.0, {}), (0.02, {}), *((0.02, {each: True}) for each in WAYS)):
            model = DistributedDataParallel(network(), bucket_cap_mb=cap, **ddp)
            handle = gradwire.compress(model, method, **guards)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for step in range(8):
                inputs, labels = batch(dist.get_rank(), step)
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                loss = nn.functional.cross_entropy(model(inputs), labels)
                (loss * (torch.inf if step == 5 and dist.get_rank() else 1)).backward()
                if all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters()):
                    optimizer.step()
            results.append(flat(model))
            handle.close()
        assert all(torch.equal(results[0], other) for other in results), method


@pytest.mark.parametrize(("method", "options"), [("qsgd", {"bits": 8}), ("acpsgd", {"rank": 2}), ("dense", {})])
@ranks(2)
def test_synchronizer_does_what_ddp_does(method: str, options: dict[str, Any]) -> None:
    model = DistributedDataParallel(network())
    gradwire.compress(model, method, **options)
    expected = train(model, range(3))
    net = network()
    sync = gradwire.Synchronizer(net.named_parameters(), method, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(3):
        inputs, labels = batch(dist.get_rank(), step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        sync.synchronize()
        optimizer.step()
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    assert sync.stats().steps == 3


@ranks(2)
def test_ways_of_training() -> None:
    for way in WAYS:
        model = DistributedDataParallel(network(), bucket_cap_mb=0.02, **{way: True})
        handle = gradwire.compress(model, "topk", ratio=0.05)
        train(model, range(4))
        assert handle.stats().steps == 4
        handle.close()
    model = DistributedDataParallel(network())
    handle = gradwire.compress(model, "efsignsgd")
    inputs, labels = batch(dist.get_rank(), 0)
    with model.no_sync():
        nn.functional.cross_entropy(model(inputs), labels).backward()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    assert handle.stats().steps == 1
    handle.close()


def other_precision(dtype: torch.dtype, granularity: str) -> bytes:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).to(dtype))
    handle = gradwire.compress(model, "qsgd", bits=8, granularity=granularity)
    own = gradwire.Synchronizer(copy.deepcopy(model.module), "dense")
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
    model(inputs).sum().backward()
    own.synchronize()
    values = sum(parameter.numel() for parameter in model.parameters())
    assert handle.stats().dense_bytes == own.stats().dense_bytes == dtype.itemsize * values
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.dtype == dtype for gradient in gradients)
    return torch.cat([gradient.float().view(-1) for gradient in gradients if gradient is not None]).numpy().tobytes()


@pytest.mark.parametrize("granularity", ["layer", "model"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_models_of_other_precision(pool: Pool, dtype: torch.dtype, granularity: str) -> None:
    first, second = pool.run(2, other_precision, dtype, granularity)
    assert first == second


@ranks(4)
def test_two_models_on_a_subgroup() -> None:
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() == 3:
        return
    for _ in range(2):
        model = DistributedDataParallel(network(), process_group=group)
        gradwire.compress(model, "powersgd", rank=2)
        other = DistributedDataParallel(network(), process_group=group)
        gradwire.compress(other, "efsignsgd")
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
        for step in range(3):
            inputs, labels = batch(dist.get_rank(), step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs) + other(inputs), labels).backward()
            optimizer.step()
        for trained in (model, other):
            mine = flat(trained)
            everyone = [torch.empty_like(mine) for _ in range(3)]
            dist.all_gather(everyone, mine, group=group)
            assert all(torch.equal(mine, theirs) for theirs in everyone)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("efsignsgd", {}),
        ("topk", {"ratio": 0.05}),
        ("powersgd", {"rank": 2}),
        ("acpsgd", {"rank": 2}),
        ("randomk", {"ratio": 0.1}),
        ("qsgd", {"bits": 4}),
    ],
)
@ranks(2)
def test_a_resumed_run_is_the_same_run(method: str, options: dict[str, Any]) -> None:
    def attach() -> tuple[DistributedDataParallel, gradwire.Handle]:
        model = DistributedDataParallel(network())
        return model, gradwire.compress(model, method, **options)

    model, handle = attach()
    train(model, range(4))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    saved = handle.state_dict()
    train(model, range(4, 8))
    resumed, again = attach()
    resumed.load_state_dict(weights)
    again.load_state_dict(saved)
    train(resumed, range(4, 8))
    assert torch.equal(flat(model), flat(resumed)), method
    handle.close()
    again.close()


def test_state_holds_tensors_and_plain_values_only(pool: Pool, tmp_path: Any) -> None:
    pool.run(1, save_and_load, str(tmp_path / "state.pt"))


def save_and_load(path: str) -> None:
    model = DistributedDataParallel(network())
    handle = gradwire.compress(model, "acpsgd", rank=2)
    train(model, range(2))
    torch.save(handle.state_dict(), path)
    loaded = torch.load(path, weights_only=True)
    handle.load_state_dict(loaded)
    assert loaded["tensors"].keys() == {"residual", "p", "q"}
    handle.close()


@ranks(1)
def test_an_error_in_a_method_reaches_the_training_loop() -> None:
    """A method that fails surfaces with its own traceback, and leaves no thread hanging."""
    from gradwire.methods.floats import Dense

    class Broken(Dense):
        def synchronize(self, gradient: torch.Tensor, state: Any, step: int) -> Any:
            if step == 5:
                raise ZeroDivisionError("broken on purpose")
            return super().synchronize(gradient, state, step)

    model = DistributedDataParallel(network())
    handle = gradwire.compress(model, Broken())
    with pytest.raises(Exception, match="broken on purpose"):
        train(model, range(6))
    with pytest.raises(gradwire.GradwireError, match="an earlier step failed"):
        handle.wire.promise()
    handle.close()


@ranks(1)
def test_an_error_in_the_rehearsal_leaves_the_model_as_it_was() -> None:
    """A method that cannot work at all is found when it is attached, and the model stays as it was."""
    from gradwire.methods.floats import Dense

    class Broken(Dense):
        def init(self, context: Any) -> Any:
            raise ZeroDivisionError("broken on purpose")

    model = DistributedDataParallel(network())
    with pytest.raises(ZeroDivisionError, match="broken on purpose"):
        gradwire.compress(model, Broken())
    handle = gradwire.compress(model, "dense")
    train(model, range(1))
    handle.close()


@ranks(2)
def test_collectives_wait_as_long_as_the_users_group() -> None:
    group = dist.new_group(timeout=timedelta(seconds=77))
    sync = gradwire.Synchronizer(network().named_parameters(), "dense", process_group=group)
    transport = sync.wire._transport
    assert isinstance(transport, ProcessGroupTransport)
    assert timeout_of(transport._group) == timedelta(seconds=77)
    sync.close()
