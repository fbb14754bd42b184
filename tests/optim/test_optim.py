"""Adam with compressed momenta: what it is equal to, what it keeps, and what nobody takes."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.optim import CompressedAdam, OneBitAdam, OneBitLamb, ZeroOneAdam
from local_training import backward, flat, gathered, network, same_everywhere, train
from pool import Pool

KINDS: dict[str, tuple[type[CompressedAdam], dict[str, Any]]] = {
    "one bit": (OneBitAdam, {"freeze_step": 4}),
    "zero one": (ZeroOneAdam, {"freeze_step": 4, "kappa": 2, "double_every": 3, "max_interval": 4}),
    "lamb": (OneBitLamb, {"freeze_step": 4}),
}
MEASURED_EVERY_STEP: dict[str, dict[str, int]] = {"one bit": {}, "zero one": {"kappa": 100}, "lamb": {}}
MET = {
    "one bit": [True] * 16,
    "lamb": [True] * 16,
    # synchronised in every step up to 7, then every second, from step 10 on every fourth
    "zero one": [True] * 7 + [False, True, False, False, False, True, False, False, False],
}


def made(kind: str, params: Any, **options: Any) -> CompressedAdam:
    maker, own = KINDS[kind]
    named = params.named_parameters() if isinstance(params, nn.Module) else params
    return maker(named, **{"lr": 0.01, **own, **options})


def meet(optimizer: CompressedAdam) -> None:
    """Makes parameters the same on all ranks where they may differ."""
    if isinstance(optimizer, ZeroOneAdam):
        optimizer.synchronize()


def bytes_of(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def same(ours: Any, theirs: Any) -> bool:
    """Whether two states are equal to the last bit."""
    if isinstance(ours, Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


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
    for stop in (2, 12):  # while the variance is measured, and later between two synchronisations
        net, other = network(), network()
        options = {"method": "qsgd", "bits": 4, "memory": "residual"}
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
        ("grad_scaler is no option", {"grad_scaler": torch.amp.GradScaler("cpu")}),
        ("rollback is no option", {"rollback": False}),
        ("ranks differ", {"freeze_step": 5 + rank}),
        ("ranks differ", {"lr": 0.1 * (1 + rank)}),
    ]
    if kind == "zero one":
        wrong += [(f"{name}={value}", {name: value}) for name in KINDS[kind][1] for value in (0, -1, 1.5)]
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
    with pytest.raises(gradwire.ConfigurationError, match=r"when averaging began: 0.weight, 0.bias; they are in no"):
        optimizer.step()
    optimizer.close()
    optimizer = made(kind, net)
    net[0].requires_grad_(False)
    with pytest.raises(gradwire.ConfigurationError, match=r"frozen now: 0.weight, 0.bias; momentum would"):
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


def meets_in_the_middle() -> None:
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


def test_workers_meet_at_the_mean_of_where_they_went(pool: Pool) -> None:
    pool.run(3, meets_in_the_middle)


STOP, END = 11, 18


def begun(kind: str, options: dict[str, Any], data: int | None) -> tuple[bytes, bytes, Tensor]:
    """Trains on and on; two states on the way, of workers apart and after they met, and parameters at the end."""
    net = network()
    optimizer = made(kind, net, **options)
    train(net, optimizer, range(STOP), data)
    apart = bytes_of(optimizer.state_dict())
    meet(optimizer)
    met = bytes_of({"net": net.state_dict(), "optimizer": optimizer.state_dict()})
    train(net, optimizer, range(STOP, END), data)
    meet(optimizer)
    optimizer.close()
    return apart, met, flat(net)


def gone_on(kind: str, options: dict[str, Any], data: int | None, saved: list[bytes]) -> Tensor:
    """Goes on from the states of another number of workers."""
    loaded = [torch.load(io.BytesIO(each), weights_only=True) for each in saved]
    states = [each["optimizer"] for each in loaded]
    net = network()
    net.load_state_dict(loaded[0]["net"])
    optimizer = made(kind, net, **options)
    with pytest.raises(gradwire.ConfigurationError, match=r"gradwire.redistribute makes states"):
        optimizer.load_state_dict(states[0])
    compressions = [state["gradwire"]["compression"] for state in states]
    now = gradwire.redistribute(states[::-1], dist.get_world_size())
    assert same([each["gradwire"]["compression"] for each in now], gradwire.redistribute(compressions, len(now)))
    mine = now[dist.get_rank()]
    optimizer.load_state_dict(mine)
    assert optimizer.steps == STOP
    mine["gradwire"]["compression"]["ranks"] = tuple(range(len(now)))
    assert same(optimizer.state_dict(), mine)
    train(net, optimizer, range(STOP, END), data)
    meet(optimizer)
    assert same_everywhere(flat(net))
    assert flat(net).isfinite().all()
    optimizer.close()
    return flat(net)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_other_workers_go_on_where_a_run_stopped(pool: Pool, kind: str, before: int, after: int) -> None:
    """And where all have the same data, how many they are changes nothing up to the rounding of sums."""
    runs: list[tuple[dict[str, Any], int | None]] = [({}, None), ({"method": "topk", "ratio": 0.1}, 0)]
    alone = [pool.run(before, begun, kind, *run) for run in runs]
    others = [
        pool.run(after, gone_on, kind, *run, [met for _, met, _ in each]) for run, each in zip(runs, alone, strict=True)
    ]
    torch.testing.assert_close(others[1][0], alone[1][0][2], rtol=1e-4, atol=1e-5)
    apart = [torch.load(io.BytesIO(each), weights_only=True) for each, _, _ in alone[0]]
    for each in apart:
        each["gradwire"]["compression"]["ranks"] = ()  # any group may load what redistribute() makes
    assert same(gradwire.redistribute(apart[::-1], before), apart)
    if kind == "zero one":
        with pytest.raises(gradwire.ConfigurationError, match=r"exp_avg.* of rank 1 is not .* synchronize\(\)"):
            gradwire.redistribute(apart, after)
    with pytest.raises(gradwire.ConfigurationError, match="not all states are of an optimizer"):
        gradwire.redistribute([apart[0], apart[1]["gradwire"]["compression"]], after)


def averages_of_tensors() -> None:
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
def test_momenta_keep_their_length(pool: Pool, kind: str) -> None:
    pool.run(1, momenta_keep_their_length, kind)


def momenta_keep_their_length(kind: str) -> None:
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


def test_a_synchronizer_averages_other_tensors(pool: Pool) -> None:
    pool.run(2, averages_of_tensors)


EPOCHS = 16


def accuracy(kind: str, options: dict[str, int], rate: float = 0.003) -> float:
    """Test accuracy on scikit-learn's digits, as in ``test_training.py`` but with Adam."""
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = (images.float() / 16).view(-1, 1, 8, 8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    test, train = order[:500], order[500:]
    torch.manual_seed(2)
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(288, 96), nn.ReLU(), nn.Linear(96, 10),
    )  # fmt: skip
    optimizer = made(kind, net, lr=rate, **options)
    total = EPOCHS * (len(train) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=total, cycle_momentum=False)
    shuffle = torch.Generator().manual_seed(3)
    for _ in range(EPOCHS):
        for batch in train[torch.randperm(len(train), generator=shuffle)].split(64):
            if len(batch) == 64:
                mine = batch[dist.get_rank() :: dist.get_world_size()]
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(images[mine]), labels[mine]).backward()
                optimizer.step()
                schedule.step()
    meet(optimizer)
    optimizer.close()
    with torch.no_grad():
        return 100 * float((net(images[test]).argmax(1) == labels[test]).float().mean())


def test_accuracy_is_within_two_percent_of_adam(pool: Pool) -> None:
    runs: list[tuple[str, dict[str, int]]] = [
        ("one bit", {"freeze_step": 10**6}),  # Adam, bit for bit
        ("one bit", {"freeze_step": 60}),
        ("zero one", {"freeze_step": 60, "kappa": 16, "double_every": 60}),
    ]
    adam, one_bit, zero_one = (pool.run(2, accuracy, *run)[0] for run in runs)
    assert adam > 94
    assert one_bit >= adam - 2
    assert zero_one >= adam - 2


def test_accuracy_is_within_two_percent_of_lamb(pool: Pool) -> None:
    lamb, one_bit = (pool.run(2, accuracy, "lamb", {"freeze_step": steps}, 0.03)[0] for steps in (10**6, 60))
    assert lamb > 94
    assert one_bit >= lamb - 2
