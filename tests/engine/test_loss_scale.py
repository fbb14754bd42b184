"""With a loss scaler, what is remembered is in units of the loss, so a change of scale changes nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import ConfigurationError
from models import batch, flat, network
from pool import ranks

TRAINED: list[tuple[str, dict[str, Any]]] = [
    ("dense", {}),
    ("efsignsgd", {}),
    ("topk", {"ratio": 0.1, "granularity": "model"}),
    ("powersgd", {"rank": 2}),
    ("acpsgd", {"rank": 2}),
    ("threshold", {"threshold": 0.01}),
    ("ef21", {"ratio": 0.1}),
]
STEPS = 5


def trained(scaler: GradScaler | None, method: str, options: dict[str, Any], ddp: bool = True) -> torch.Tensor:
    """Plain SGD until ``STEPS`` steps were made, with a scale that grows every second step and is set anew once."""
    net = network()
    if ddp:
        model: nn.Module = DistributedDataParallel(net, bucket_cap_mb=0.02)
        handle = gradwire.compress(model, method, grad_scaler=scaler, **options)
    else:
        model, handle = net, gradwire.Synchronizer(net.named_parameters(), method, grad_scaler=scaler, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    while handle.engine.step < STEPS:
        step = handle.engine.step
        inputs, labels = batch(dist.get_rank(), step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if not ddp:
            handle.synchronize()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
            if step == 3 and scaler.is_enabled():
                scaler.update(2.0**20)
        handle.wire.call(lambda: None)
    handle.close()
    return flat(net)


@ranks(2)
def test_a_change_of_scale_changes_no_bit() -> None:
    for method, options in TRAINED:
        for ddp in (True, False):
            expected = trained(None, method, options, ddp)
            scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
            assert torch.equal(trained(scaler, method, options, ddp), expected), (method, ddp)
            assert scaler.get_scale() >= 2.0**20


@ranks(2)
def test_skipped_steps_leave_nothing() -> None:
    """From a scale that overflows, training goes on as if the steps that were skipped had not been."""
    for method, options in TRAINED[1:4]:
        expected = trained(None, method, options)
        scaler = GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-10, growth_interval=1000)
        assert torch.equal(trained(scaler, method, options), expected), method
        assert torch.equal(trained(GradScaler("cpu", enabled=False), method, options), expected), method


@ranks(2)
def test_half_precision_is_remembered_in_full() -> None:
    """A residual is kept in float32 and in units of the loss, whatever the gradient's dtype and scale."""
    for dtype in (torch.float16, torch.bfloat16):
        for granularity in ("layer", "model"):
            parameter = nn.Parameter(torch.zeros(40, 50, dtype=dtype))
            scaler = GradScaler("cpu", init_scale=2.0**8)
            sync = gradwire.Synchronizer(
                [("weight", parameter)], "efsignsgd", granularity=granularity, grad_scaler=scaler
            )
            total, applied = torch.zeros(40, 50), torch.zeros(40, 50)
            for step in range(4):
                generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
                gradient = torch.randn(40, 50, generator=generator).to(dtype)
                scaler.scale(torch.zeros(1))
                parameter.grad = gradient * scaler.get_scale()
                sync.synchronize()
                total += gradient.float()
                applied += parameter.grad.float() / scaler.get_scale()
                scaler._scale.mul_(4.0)
            tensors = sync.state_dict()["tensors"]
            remembered = tensors["residual"]["weight"]
            assert remembered.dtype == torch.float32
            owed = total - remembered
            owner = torch.zeros(2000)
            low = 0 if dist.get_rank() == 0 else 2000 - len(tensors["owner_residual"]["weight"])
            owner[low : low + len(tensors["owner_residual"]["weight"])] = tensors["owner_residual"]["weight"]
            dist.all_reduce(owed)
            dist.all_reduce(owner)
            expected = owed / 2 - owner.view(40, 50)
            rounding = 4 * torch.finfo(dtype).eps * 2  # four averages of a magnitude below 2, each rounded to the dtype
            assert (applied - expected).abs().max() < rounding, (dtype, granularity)
            sync.close()


@ranks(1)
def test_squares_are_in_units_of_the_loss() -> None:
    found = []
    for scale in (1.0, 2.0**9):
        net = nn.Linear(48, 96)
        nn.init.constant_(net.weight, 0.1)
        nn.init.zeros_(net.bias)
        scaler = GradScaler("cpu", init_scale=scale)
        sync = gradwire.Synchronizer(
            net.named_parameters(), "variance", moments="samples", alpha=0.5, grad_scaler=scaler
        )
        gradwire.SecondMoments(net, sync, per="samples")
        for step in range(3):
            inputs, labels = batch(dist.get_rank(), step)
            net.zero_grad()
            scaler.scale(nn.functional.cross_entropy(net(inputs), labels)).backward()
            sync.synchronize()
        found.append(sync.state_dict()["tensors"])
        sync.close()
    for field, tensors in found[0].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, found[1][field][name]), (field, name)


@ranks(2)
def test_scalers_are_checked() -> None:
    net = network()
    with pytest.raises(ConfigurationError, match=re.escape("grad_scaler is a float; give the torch.amp.GradScaler")):
        gradwire.Synchronizer(net.named_parameters(), "topk", grad_scaler=1024.0)
    with pytest.raises(ConfigurationError, match=r"ranks differ: rank 0 has 'grad_scaler=with scale 1\.0', rank 1 has"):
        gradwire.Synchronizer(
            net.named_parameters(), "topk", grad_scaler=GradScaler("cpu", init_scale=1.0 + dist.get_rank())
        )
    with pytest.raises(ConfigurationError, match="ranks differ"):
        gradwire.Synchronizer(net.named_parameters(), "topk", rollback=dist.get_rank() == 1)
    scaler = GradScaler("cpu")
    sync = gradwire.Synchronizer(net.named_parameters(), "topk", grad_scaler=scaler)
    with pytest.raises(ConfigurationError, match="has not scaled a loss yet"):
        sync.synchronize()
    scaler.scale(torch.ones(()))
    sync.synchronize()
    assert sync.stats().steps == 1
    sync.close()


@ranks(2)
def test_gradients_that_are_unscaled_already_are_refused() -> None:
    net, scaler = network(), GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    sync = gradwire.Synchronizer(net, "topk", ratio=0.1, grad_scaler=scaler)
    for early in (True, False):
        optimizer.zero_grad()
        scaler.scale(net(batch(dist.get_rank(), 0)[0]).square().mean()).backward()
        if early:
            scaler.unscale_(optimizer)
            before = [each.grad.clone() for each in net.parameters() if each.grad is not None]
            with pytest.raises(ConfigurationError, match=r"call synchronize\(\) before unscale_\(\)"):
                sync.synchronize()
            assert all(map(torch.equal, before, [each.grad for each in net.parameters() if each.grad is not None]))
        else:
            sync.synchronize()
        scaler.step(optimizer)
        scaler.update()
    assert sync.stats().steps == 1
    sync.close()
