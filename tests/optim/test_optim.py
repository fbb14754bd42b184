"""Adam with compressed momenta: what it is equal to, what it keeps, and what nobody takes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from compressed_adam import KINDS, MEASURED_EVERY_STEP, MET, bytes_of, made, meet, same
from gradwire.optim import ZeroOneAdam
from local_training import backward, network, train
from models import flat, gathered, same_everywhere
from pool import Pool, ranks


def it_is_adam_while_the_variance_is_measured(kind: str) -> None:
    """Bit for bit, and gradients are left as they are."""
    ours, theirs = network(), network()
    groups = [list(net.parameters()) for net in (ours, theirs)]
    split = [[{"params": each[:3]}, {"params": each[3:], "lr": 0.003, "weight_decay": 0.1}] for each in groups]
    optimizer = made(kind, split[0], freeze_step=100, **MEASURED_EVERY_STEP[kind])
    reference = torch.optim.AdamW(split[1], lr=0.01, weight_decay=0)
    sync = gradwire.Synchronizer(theirs.named_parameters(), "dense")
    for step in range(6):
        backward(ours, step)
        backward(theirs, step)
        optimizer.step()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(*groups, strict=True))
        sync.synchronize()
        reference.step()
        assert torch.equal(flat(ours), flat(theirs))
    optimizer.close()
    sync.close()


def with_dense_averages_it_is_adam_with_a_variance_that_stands_still(kind: str) -> None:
    """Without floor and with every step synchronised."""
    ours, theirs = network(), network()
    options = {"double_every": 100} if kind == "zero one" else {}
    optimizer = made(kind, ours, floor=0.0, method="dense", **MEASURED_EVERY_STEP[kind], **options)
    sync = gradwire.Synchronizer(theirs.named_parameters(), "dense")
    moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in theirs.parameters()]
    for step in range(12):
        train(ours, optimizer, range(step, step + 1))
        backward(theirs, step)
        sync.synchronize()
        with torch.no_grad():
            for parameter, (m, v) in zip(theirs.parameters(), moments, strict=True):
                m.lerp_(parameter.grad, 0.1)
                if step < 4:
                    v.mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
                root = (v / (1 - 0.999 ** min(step + 1, 4))).sqrt() + 1e-8
                parameter.sub_(0.01 / (1 - 0.9 ** (step + 1)) * m / root)
    assert (flat(ours) - flat(theirs)).abs().max() < 2e-5  # of parameters near 0.2
    optimizer.close()
    sync.close()


def ranks_have_the_same_bits_whenever_they_have_met(kind: str) -> None:
    net = network()
    optimizer = made(kind, net, weight_decay=0.1)
    agree = []
    for step in range(16):
        train(net, optimizer, range(step, step + 1))
        agree.append(same_everywhere(flat(net)))
    assert agree == MET[kind]
    meet(optimizer)
    assert same_everywhere(flat(net))
    assert all(same_everywhere(optimizer.state[each]["exp_avg"]) for each in net.parameters())
    optimizer.close()


def half_precision_is_near_and_ddp_without_its_averages_the_same(kind: str) -> None:
    half, wrapped, plain = network().bfloat16(), DistributedDataParallel(network()), network()
    optimizers = [made(kind, each) for each in (half, wrapped, plain)]
    for step in range(6):
        noise = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        inputs = torch.randn(16, 20, generator=noise)
        with wrapped.no_sync():
            for each, optimizer in zip((half, wrapped, plain), optimizers, strict=True):
                each.zero_grad()
                each(inputs.to(next(each.parameters()).dtype)).square().sum().backward()
                optimizer.step()
    assert same_everywhere(flat(half))
    assert torch.equal(flat(wrapped), flat(plain))
    assert (flat(half) - flat(plain)).abs().mean() < 0.1 * flat(plain).abs().mean()
    for optimizer in optimizers:
        optimizer.close()


def a_compressed_step_sends_one_bit_a_value(kind: str) -> None:
    """Bytes a step over those of a dense average, before and after the variance stands still."""
    net = nn.Sequential(nn.Linear(20, 512, bias=False), nn.Linear(512, 512, bias=False))
    optimizer = made(kind, net, broadcast=True)
    ratios, before = [], optimizer.stats()
    for steps in (range(4), range(4, 20)):
        train(net, optimizer, steps)
        now = optimizer.stats()
        assert now.steps == steps.stop
        ratios.append((now.wire_bytes - before.wire_bytes) / (now.dense_bytes - before.dense_bytes))
        before = now
    warm, compressed = ratios
    if kind != "zero one":
        assert warm == 1
        assert 1 / 32 <= compressed < 1.01 / 32
    else:
        assert warm < 1
        assert compressed < 0.6 / 32
    optimizer.close()


def a_run_goes_on_as_if_it_had_not_stopped(kind: str) -> None:
    inside = {"inside": f"{dist.get_world_size()}:qsgd:4"}
    for stop, more in ((2, inside), (12, {})):  # while the variance is measured, later between two synchronisations
        net, other = network(), network()
        options: dict[str, Any] = {"method": "qsgd", "bits": 4, "memory": "residual", **more}
        optimizer, resumed, third = made(kind, net, **options), made(kind, other, lr=0.5, **options), made(kind, net)
        train(net, optimizer, range(stop))
        model, saved = copy.deepcopy(net.state_dict()), gradwire.PerRank(optimizer).state_dict()
        train(net, optimizer, range(stop, stop + 8))
        other.load_state_dict(model)
        gradwire.PerRank(resumed).load_state_dict(saved)
        train(other, resumed, range(stop, stop + 8))
        assert torch.equal(flat(net), flat(other))
        assert same(optimizer.state_dict(), resumed.state_dict())
        kept = bytes_of(third.state_dict())
        for spoilt in (
            optimizer.state_dict(),
            {**third.state_dict(), "gradwire": {"version": 0}},
            torch.optim.Adam(net.parameters()).state_dict(),
        ):
            with pytest.raises(gradwire.ConfigurationError):
                third.load_state_dict(spoilt)
        assert bytes_of(third.state_dict()) == kept
        for each in (optimizer, resumed, third):
            each.close()


def nobody_takes_a_step_that_is_not_finite(kind: str) -> None:
    net = network()
    optimizer = made(kind, net)
    for step in (1, 6):  # both synchronised, the second compressed
        train(net, optimizer, range(optimizer.steps, step))
        before, state, skipped = flat(net), bytes_of(optimizer.state_dict()), optimizer.skipped
        backward(net, step)
        if dist.get_rank() == 1:
            net[2].weight.grad[3, 4] = float("inf")
        optimizer.step()
        assert torch.equal(flat(net), before)
        assert (optimizer.steps, optimizer.skipped) == (step, skipped + 1)
        optimizer.skipped = skipped
        assert bytes_of(optimizer.state_dict()) == state
    if isinstance(optimizer, ZeroOneAdam):
        train(net, optimizer, range(6, 10))
        before, alone = flat(net), bytes_of(dict(optimizer.state[net[2].weight]))
        backward(net, 10)
        if dist.get_rank() == 1:
            net[2].weight.grad[3, 4] = float("nan")
        optimizer.step()  # a local one
        sat_out = torch.equal(flat(net), before) and alone == bytes_of(dict(optimizer.state[net[2].weight]))
        assert sat_out == (dist.get_rank() == 1)
        assert optimizer.steps == 11
        optimizer.synchronize()
        assert same_everywhere(flat(net))
        assert flat(net).isfinite().all()
    optimizer.close()


def a_loss_scaler_changes_no_bit_and_its_scale_may_differ_between_ranks(kind: str) -> None:
    plain, net = network(), network()
    first, second = made(kind, plain), made(kind, net)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    train(plain, first, range(12))
    for step in range(12):
        backward(net, step, float(scaler.scale(torch.ones(()))))
        scaler.step(second)
        scaler.update()
    assert torch.equal(flat(plain), flat(net))
    meet(second)
    before = flat(net)
    backward(net, 12, float(scaler.scale(torch.ones(()))))
    if dist.get_rank() == 0:
        net[0].weight.grad[0, 0] = float("inf")
    scaler.step(second)
    scaler.update()
    assert kind == "zero one" or torch.equal(flat(net), before)
    assert scaler.get_scale() == 2.0 ** (9 if dist.get_rank() == 0 else 10)
    train(net, second, range(13, 14))
    meet(second)
    assert same_everywhere(flat(net))
    assert flat(net).isfinite().all()
    for each in (first, second):
        each.close()


def what_cannot_be_is_refused(kind: str) -> None:
    net = network()
    before, rank = flat(net), dist.get_rank()
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("freeze_step=0", {"freeze_step": 0}),
        ("freeze_step=True", {"freeze_step": True}),
        ("lr=-1.0", {"lr": -1.0}),
        ("betas=(0.9, 1.0)", {"betas": (0.9, 1.0)}),
        ("floor=-0.1", {"floor": -0.1}),
        ("'nothing'", {"method": "nothing"}),
        ("momentum already", {"method": "signum"}),
        ("averages of signsgd are no means of what is sent here", {"method": "signsgd"}),
        ("grad_scaler is no option", {"grad_scaler": torch.amp.GradScaler("cpu")}),
        ("rollback is no option", {"rollback": False}),
        ("learning_rate is no option", {"learning_rate": lambda: 0.1}),
        ("foreach is no option", {"foreach": True}),
        ("a method's options go with its name", {"norm": "l1"}),
        ("ranks differ", {"freeze_step": 5 + rank}),
        ("ranks differ", {"lr": 0.1 * (1 + rank)}),
    ]
    if kind == "zero one":
        wrong += [(f"{name}={value}", {name: value}) for name in KINDS[kind][1] for value in (0, -1, 1.5)]
        wrong += [("clip_spikes is no option", {"clip_spikes": 4})]
    if kind == "lamb":
        wrong += [(f"{name}={bounds}", {name: bounds}) for name in ("trust", "factors") for bounds in ((0, 1), (2, 1))]
        wrong += [(f"{name}=1.0", {name: 1.0}) for name in ("trust_beta", "change")]
        wrong += [("ranks differ", {"change": 0.1 * (1 + rank)})]
    for said, options in wrong:
        with pytest.raises(gradwire.ConfigurationError, match=re.escape(said)):
            made(kind, net, **options)
    with pytest.raises(gradwire.ConfigurationError, match=re.escape("eps=0.0")):
        made(kind, [{"params": list(net.parameters()), "eps": 0.0}])
    optimizer = made(kind, net)
    with pytest.raises(gradwire.ConfigurationError, match="parameter group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    backward(net, 0)
    net[0].weight.grad = net[0].weight.grad.to_sparse()
    with pytest.raises(gradwire.ConfigurationError, match=re.escape("0.weight")):
        optimizer.step()
    assert torch.equal(flat(net), before)
    optimizer.close()
    net[0].requires_grad_(False)
    optimizer = made(kind, net)
    net[0].requires_grad_(True)
    with pytest.raises(gradwire.ConfigurationError, match=r"'0\..*' was frozen when the method was attached"):
        optimizer.step()
    optimizer.close()
    if rank:
        with torch.no_grad():
            net[2].bias[1] += 1
    with pytest.raises(gradwire.ConfigurationError, match=re.escape("2.bias")):
        made(kind, net)
    made(kind, net, broadcast=True).close()
    assert same_everywhere(flat(net))
    net[0].requires_grad_(False)
    optimizer = made(kind, net)
    net[0].requires_grad_(True)
    backward(net, 0)
    with pytest.raises(gradwire.ConfigurationError, match=r"'0.weight' was frozen when the method was attached"):
        optimizer.step()
    optimizer.close()
    optimizer = made(kind, net)
    net[0].requires_grad_(False)
    with pytest.raises(
        gradwire.ConfigurationError, match=r"'0.weight' was trained when averaging began and is frozen now"
    ):
        optimizer.step()
    optimizer.close()


LAWS: list[tuple[Callable[[str], None], int]] = [
    (it_is_adam_while_the_variance_is_measured, 2),
    (with_dense_averages_it_is_adam_with_a_variance_that_stands_still, 2),
    (ranks_have_the_same_bits_whenever_they_have_met, 2),
    (half_precision_is_near_and_ddp_without_its_averages_the_same, 2),
    (a_compressed_step_sends_one_bit_a_value, 2),
    (nobody_takes_a_step_that_is_not_finite, 2),
    (a_loss_scaler_changes_no_bit_and_its_scale_may_differ_between_ranks, 2),
    (what_cannot_be_is_refused, 2),
    (it_is_adam_while_the_variance_is_measured, 3),
    (ranks_have_the_same_bits_whenever_they_have_met, 3),
    (a_run_goes_on_as_if_it_had_not_stopped, 3),
]


@pytest.mark.parametrize(("law", "workers"), [pytest.param(*each, id=f"{each[0].__name__}-{each[1]}") for each in LAWS])
@pytest.mark.parametrize("kind", KINDS)
def test_of_all(pool: Pool, kind: str, law: Callable[[str], None], workers: int) -> None:
    if kind == "lamb" and "adam" in law.__name__:
        pytest.skip("it is LAMB, see test_lamb.py")
    pool.run(workers, law, kind)


def average_and_residuals_are_all_of_the_momenta() -> None:
    """What is not yet in the averaged momentum is in the residuals."""
    net = network()
    optimizer = made("one bit", net, route="gather")
    train(net, optimizer, range(4))
    owed = {name: torch.zeros_like(each) for name, each in net.named_parameters()}
    for step in range(4, 8):
        before = {name: optimizer.state[each]["exp_avg"].clone() for name, each in net.named_parameters()}
        train(net, optimizer, range(step, step + 1))
        kept = optimizer.state_dict()["gradwire"]["compression"]["tensors"]["residual"]
        assert len(kept) >= 2
        for name, residual in kept.items():
            parameter = net.get_parameter(name)
            sent = torch.lerp(before[name], parameter.grad, 0.1)
            wanted, left = (torch.stack(gathered(part)).mean(0) for part in (sent + owed[name], residual))
            difference = optimizer.state[parameter]["exp_avg"] + left - wanted
            assert difference.abs().max() < 1e-5 * wanted.abs().max()
        owed = kept
    optimizer.close()


@pytest.mark.parametrize("workers", [2, 3])
def test_average_and_residuals_are_all_of_the_momenta(pool: Pool, workers: int) -> None:
    pool.run(workers, average_and_residuals_are_all_of_the_momenta)


def measured_steps() -> list[int]:
    net = network()
    optimizer = made("zero one", net, freeze_step=30)
    found = []
    for step in range(36):
        before = optimizer.state[net[0].weight]["exp_avg_sq"].clone()
        train(net, optimizer, range(step, step + 1))
        found += [] if torch.equal(before, optimizer.state[net[0].weight]["exp_avg_sq"]) else [step]
    optimizer.close()
    return found


def test_the_variance_is_measured_ever_less_often_and_then_no_more(pool: Pool) -> None:
    assert pool.run(2, measured_steps)[0] == [0, 1, 2, 4, 6, 10, 14, 22]


@ranks(3)
def test_workers_meet_at_the_mean_of_where_they_went() -> None:
    """Without compression, workers meet at the mean of where they went, up to the decay of their steps since."""
    for decay, near in ((0.0, 1e-6), (0.1, 1e-4)):
        net = network()
        optimizer = made("zero one", net, freeze_step=2, double_every=2, method="dense", weight_decay=decay)
        train(net, optimizer, range(11))
        assert not same_everywhere(flat(net))
        middle = torch.stack(gathered(flat(net))).mean(0)
        meet(optimizer)
        assert (flat(net) - middle).abs().max() < near
        optimizer.close()


@ranks(2)
def test_a_synchronizer_averages_other_tensors() -> None:
    net = network()
    sync = gradwire.Synchronizer(net.named_parameters(), "dense")
    backward(net, 0)
    before = [each.grad.clone() for each in net.parameters()]
    mine = torch.full((64, 20), 1.0 + dist.get_rank())
    averages = sync.average({"0.weight": mine})
    assert averages.keys() == dict(net.named_parameters()).keys()
    assert torch.equal(averages.pop("0.weight"), torch.full((64, 20), 1.5))
    assert not any(each.any() for each in averages.values())
    assert all(torch.equal(each.grad, kept) for each, kept in zip(net.parameters(), before, strict=True))
    assert torch.equal(mine, torch.full((64, 20), 1.0 + dist.get_rank()))
    for wrong in ({"0.weight": mine.T}, {"nothing": mine}):
        with pytest.raises(gradwire.ConfigurationError):
            sync.average(wrong)
    sync.close()


@pytest.mark.parametrize("kind", KINDS)
@ranks(1)
def test_momenta_keep_their_length(kind: str) -> None:
    """As published, unless another method is asked for: one worker's first signs are ``|m|_2 / sqrt(d)``."""
    net = nn.Linear(40, 30)
    optimizer = made(kind, net, freeze_step=1, **MEASURED_EVERY_STEP[kind])
    for step in range(2):
        net.zero_grad()
        net(torch.randn(16, 40, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        momentum = optimizer.state[net.weight]["exp_avg"].lerp(net.weight.grad, 0.1)
        optimizer.step()
    signs = optimizer.state[net.weight]["exp_avg"]
    torch.testing.assert_close(signs.norm(), momentum.norm())
    assert signs.abs().max() <= 1.0001 * signs.abs().min()
    optimizer.close()


@pytest.mark.parametrize("kind", KINDS)
@ranks(1)
def test_parameters_without_elements(kind: str) -> None:
    optimizer = made(kind, [nn.Parameter(torch.zeros(0, 5))], freeze_step=1)
    for step in range(3):
        optimizer.step()
        assert optimizer.steps == step + 1
    optimizer.close()
