"""Adam with compressed momenta: what it is equal to, what it keeps, and what nobody takes."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.optim import OneBitAdam, ZeroOneAdam
from local_training import flat, gathered, network, same_everywhere
from pool import Pool

Adams = OneBitAdam | ZeroOneAdam
Maker = Callable[..., Adams]
MAKERS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "one bit": (OneBitAdam, {"freeze_step": 4}),
    "zero one": (ZeroOneAdam, {"freeze_step": 4, "kappa": 2, "double_every": 3, "max_interval": 4}),
}


def made(kind: str, net: nn.Module, **options: Any) -> Adams:
    maker, own = MAKERS[kind]
    optimizer: Adams = maker(net.named_parameters(), **{"lr": 0.01, **own, **options})
    return optimizer


def backward(net: nn.Module, step: int, scale: float = 1.0) -> None:
    """Gradients of a rank's own."""
    noise = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    net.zero_grad()
    (scale * net(torch.randn(16, 20, generator=noise)).square().sum()).backward()


def train(net: nn.Module, optimizer: Adams, steps: range) -> None:
    for step in steps:
        backward(net, step)
        optimizer.step()


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


def equals_adam_while_variance_is_measured() -> list[bool]:
    answers = []
    for maker, options in ((OneBitAdam, {}), (ZeroOneAdam, {"kappa": 100})):
        ours, theirs = network(), network()
        groups = [[each for each in net.parameters()] for net in (ours, theirs)]
        split = [[{"params": each[:3]}, {"params": each[3:], "lr": 0.003, "weight_decay": 0.1}] for each in groups]
        optimizer = maker(split[0], 100, lr=0.01, **options)
        reference = torch.optim.AdamW(split[1], lr=0.01, weight_decay=0)
        sync = gradwire.Synchronizer(theirs.named_parameters(), "dense")
        for step in range(6):
            backward(ours, step)
            own = [parameter.grad.clone() for parameter in groups[0]]
            optimizer.step()
            answers.append(all(torch.equal(p.grad, g) for p, g in zip(groups[0], own, strict=True)))
            backward(theirs, step)
            sync.synchronize()
            reference.step()
            answers.append(torch.equal(flat(ours), flat(theirs)))
        optimizer.close()
        sync.close()
    return answers


@pytest.mark.parametrize("workers", [2, 3])
def test_while_the_variance_is_measured_it_is_adam_bit_for_bit(pool: Pool, workers: int) -> None:
    assert all(all(answers) for answers in pool.run(workers, equals_adam_while_variance_is_measured))


def distance_to_frozen_adam() -> list[float]:
    """With dense averages, no floor and every step synchronised: from Adam whose variance stands still."""
    found = []
    for maker in (OneBitAdam, ZeroOneAdam):
        ours, theirs = network(), network()
        options = {} if maker is OneBitAdam else {"kappa": 100}
        optimizer = maker(ours.parameters(), 4, lr=0.01, floor=0.0, method="dense", **options)
        sync = gradwire.Synchronizer(theirs.named_parameters(), "dense")
        moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in theirs.parameters()]
        for step in range(12):
            backward(ours, step)
            optimizer.step()
            backward(theirs, step)
            sync.synchronize()
            with torch.no_grad():
                for parameter, (m, v) in zip(theirs.parameters(), moments, strict=True):
                    m.lerp_(parameter.grad, 0.1)
                    if step < 4:
                        v.mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
                    root = (v / (1 - 0.999 ** min(step + 1, 4))).sqrt() + 1e-8
                    parameter.sub_(0.01 / (1 - 0.9 ** (step + 1)) * m / root)
        found.append(float((flat(ours) - flat(theirs)).abs().max()))
        optimizer.close()
        sync.close()
    return found


def test_with_dense_averages_it_is_adam_with_a_variance_that_stands_still(pool: Pool) -> None:
    assert all(max(found) < 2e-5 for found in pool.run(2, distance_to_frozen_adam))  # of parameters near 0.2


def conservation() -> list[float]:
    """What is not yet in the averaged momentum is in the residuals: largest difference, over the largest momentum."""
    net = network()
    optimizer = made("one bit", net, route="gather")
    train(net, optimizer, range(4))
    found = []
    owed = {name: torch.zeros_like(each) for name, each in net.named_parameters()}
    for step in range(4, 8):
        before = {name: optimizer.state[each]["exp_avg"].clone() for name, each in net.named_parameters()}
        backward(net, step)
        optimizer.step()
        kept = optimizer.state_dict()["gradwire"]["compression"]["tensors"]["residual"]
        for name, each in net.named_parameters():
            if name not in kept:
                continue
            sent = torch.lerp(before[name], each.grad, 0.1)
            wanted, residual = (torch.stack(gathered(part)).mean(0) for part in (sent + owed[name], kept[name]))
            average = optimizer.state[each]["exp_avg"]
            found.append(float((average + residual - wanted).abs().max() / wanted.abs().max()))
            owed[name] = kept[name]
    optimizer.close()
    return found


@pytest.mark.parametrize("workers", [2, 3])
def test_average_and_residuals_are_all_of_the_momenta(pool: Pool, workers: int) -> None:
    for found in pool.run(workers, conservation):
        assert len(found) >= 8
        assert max(found) < 1e-5


def ranks_agree(kind: str) -> list[bool]:
    net = network()
    optimizer = made(kind, net, weight_decay=0.1)
    agree = []
    for step in range(16):
        train(net, optimizer, range(step, step + 1))
        agree.append(same_everywhere(flat(net)))
    if isinstance(optimizer, ZeroOneAdam):
        optimizer.synchronize()
        agree.append(same_everywhere(flat(net)))
        moments = [optimizer.state[each]["exp_avg"] for each in net.parameters()]
        agree.append(all(same_everywhere(each) for each in moments))
    optimizer.close()
    return agree


@pytest.mark.parametrize("workers", [2, 3])
def test_ranks_have_the_same_bits_whenever_they_have_met(pool: Pool, workers: int) -> None:
    for agree in pool.run(workers, ranks_agree, "one bit"):
        assert all(agree)
    for agree in pool.run(workers, ranks_agree, "zero one"):
        # synchronised in every step up to 7, then every second, from step 10 on every fourth
        assert agree[:16] == [True] * 7 + [False, True, False, False, False, True, False, False, False]
        assert agree[16:] == [True, True]


def other_models(kind: str) -> list[bool]:
    half, wrapped, plain = network().bfloat16(), DistributedDataParallel(network()), network()
    optimizers = [made(kind, each) for each in (half, wrapped, plain)]
    for step in range(6):
        noise = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        inputs = torch.randn(16, 20, generator=noise)
        for each in (half, plain):
            each.zero_grad()
            each(inputs.to(next(each.parameters()).dtype)).square().sum().backward()
        with wrapped.no_sync():
            wrapped.zero_grad()
            wrapped(inputs).square().sum().backward()
        for each in optimizers:
            each.step()
    for each in optimizers:
        each.close()
    near = float((flat(half) - flat(plain)).abs().mean() / flat(plain).abs().mean())
    return [same_everywhere(flat(half)), torch.equal(flat(wrapped), flat(plain)), near < 0.1]


@pytest.mark.parametrize("kind", MAKERS)
def test_half_precision_and_ddp_without_its_averages(pool: Pool, kind: str) -> None:
    assert all(all(answers) for answers in pool.run(2, other_models, kind))


def measured_steps() -> list[int]:
    net = network()
    optimizer = ZeroOneAdam(net.named_parameters(), 30, kappa=2)
    found = []
    for step in range(36):
        before = optimizer.state[net[0].weight]["exp_avg_sq"].clone()
        train(net, optimizer, range(step, step + 1))
        found += [] if torch.equal(before, optimizer.state[net[0].weight]["exp_avg_sq"]) else [step]
    optimizer.close()
    return found


def test_the_variance_is_measured_ever_less_often_and_then_no_more(pool: Pool) -> None:
    assert pool.run(2, measured_steps)[0] == [0, 1, 2, 4, 6, 10, 14, 22]


def meets_in_the_middle() -> float:
    """Without compression, workers meet at the mean of where they went; largest difference."""
    net = network()
    optimizer = ZeroOneAdam(net.named_parameters(), 2, lr=0.01, double_every=2, max_interval=4, method="dense")
    train(net, optimizer, range(11))
    assert not same_everywhere(flat(net))
    middle = torch.stack(gathered(flat(net))).mean(0)
    optimizer.synchronize()
    optimizer.close()
    return float((flat(net) - middle).abs().max())


def test_workers_meet_at_the_mean_of_where_they_went(pool: Pool) -> None:
    assert max(pool.run(3, meets_in_the_middle)) < 1e-6


def sent_a_step(kind: str) -> tuple[float, float]:
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
    optimizer.close()
    return ratios[0], ratios[1]


def test_a_compressed_step_sends_one_bit_a_value(pool: Pool) -> None:
    for warm, compressed in pool.run(2, sent_a_step, "one bit"):
        assert warm == 1
        assert 1 / 32 <= compressed < 1.01 / 32
    for warm, compressed in pool.run(2, sent_a_step, "zero one"):
        assert warm < 1
        assert compressed < 0.6 / 32


def restarts(kind: str, stop: int) -> list[bool]:
    net, other = network(), network()
    optimizer = made(kind, net, method="qsgd", bits=4, memory="residual")
    train(net, optimizer, range(stop))
    saved = bytes_of({"net": net.state_dict(), "optimizer": optimizer.state_dict()})
    train(net, optimizer, range(stop, stop + 8))
    resumed = made(kind, other, method="qsgd", bits=4, memory="residual", lr=0.5)
    state = torch.load(io.BytesIO(saved), weights_only=True)
    other.load_state_dict(state["net"])
    resumed.load_state_dict(state["optimizer"])
    train(other, resumed, range(stop, stop + 8))
    answers = [torch.equal(flat(net), flat(other)), same(optimizer.state_dict(), resumed.state_dict())]
    third = made(kind, network())
    kept = bytes_of(third.state_dict())
    for spoilt in (state["optimizer"], {**third.state_dict(), "gradwire": {"version": 0}}, torch.optim.Adam(
        net.parameters()).state_dict()):  # fmt: skip
        with pytest.raises(gradwire.ConfigurationError):
            third.load_state_dict(spoilt)
    answers.append(bytes_of(third.state_dict()) == kept)
    for each in (optimizer, resumed, third):
        each.close()
    return answers


@pytest.mark.parametrize("kind", MAKERS)
def test_a_run_goes_on_as_if_it_had_not_stopped(pool: Pool, kind: str) -> None:
    for stop in (2, 12):  # while the variance is measured, and later between two synchronisations
        assert all(all(answers) for answers in pool.run(3, restarts, kind, stop))


def spoilt_steps(kind: str) -> list[bool]:
    net = network()
    optimizer = made(kind, net)
    answers = []
    for step in (1, 6):  # both synchronised, the second compressed
        train(net, optimizer, range(optimizer.steps, step))
        before, skipped = (flat(net), bytes_of(optimizer.state_dict())), optimizer.skipped
        backward(net, step)
        if dist.get_rank() == 1:
            net[2].weight.grad[3, 4] = float("inf")
        optimizer.step()
        answers += [torch.equal(flat(net), before[0]), optimizer.skipped == skipped + 1, optimizer.steps == step]
        optimizer.skipped = skipped
        answers.append(bytes_of(optimizer.state_dict()) == before[1])
    if isinstance(optimizer, ZeroOneAdam):
        train(net, optimizer, range(6, 10))
        before, alone = (flat(net), b""), bytes_of(dict(optimizer.state[net[2].weight]))
        backward(net, 10)
        if dist.get_rank() == 1:
            net[2].weight.grad[3, 4] = float("nan")
        optimizer.step()  # a local one
        sat_out = torch.equal(flat(net), before[0]) and alone == bytes_of(dict(optimizer.state[net[2].weight]))
        answers += [sat_out == (dist.get_rank() == 1), optimizer.steps == 11]
        optimizer.synchronize()
        answers += [same_everywhere(flat(net)), bool(flat(net).isfinite().all())]
    optimizer.close()
    return answers


@pytest.mark.parametrize("kind", MAKERS)
def test_nobody_takes_a_step_that_is_not_finite(pool: Pool, kind: str) -> None:
    assert all(all(answers) for answers in pool.run(2, spoilt_steps, kind))


def scaled(kind: str) -> list[bool]:
    plain, net = network(), network()
    first, second = made(kind, plain), made(kind, net)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    train(plain, first, range(12))
    for step in range(12):
        backward(net, step, float(scaler.scale(torch.ones(()))))
        scaler.step(second)
        scaler.update()
    answers = [torch.equal(flat(plain), flat(net))]
    if isinstance(second, ZeroOneAdam):
        second.synchronize()
    before = flat(net)
    backward(net, 12, float(scaler.scale(torch.ones(()))))
    if dist.get_rank() == 0:
        net[0].weight.grad[0, 0] = float("inf")
    scaler.step(second)
    scaler.update()
    answers.append(isinstance(second, ZeroOneAdam) or torch.equal(flat(net), before))
    answers.append(scaler.get_scale() == 2.0 ** (9 if dist.get_rank() == 0 else 10))
    train(net, second, range(13, 14))
    if isinstance(second, ZeroOneAdam):
        second.synchronize()
    answers.append(same_everywhere(flat(net)) and bool(flat(net).isfinite().all()))
    for each in (first, second):
        each.close()
    return answers


@pytest.mark.parametrize("kind", MAKERS)
def test_a_loss_scaler_changes_no_bit_and_its_scale_may_differ_between_ranks(pool: Pool, kind: str) -> None:
    assert all(all(answers) for answers in pool.run(2, scaled, kind))


def refusals() -> list[str]:
    net = network()
    parameters = list(net.named_parameters())
    before = flat(net)
    wrong: list[Callable[[], object]] = [
        lambda: OneBitAdam(parameters, 0),
        lambda: OneBitAdam(parameters, True),
        lambda: OneBitAdam(parameters, 5, lr=-1.0),
        lambda: OneBitAdam(parameters, 5, betas=(0.9, 1.0)),
        lambda: OneBitAdam([{"params": parameters, "eps": 0.0}], 5),
        lambda: OneBitAdam(parameters, 5, floor=-0.1),
        lambda: OneBitAdam(parameters, 5, method="nothing"),
        lambda: OneBitAdam(parameters, 5, method="signum"),
        lambda: OneBitAdam(parameters, 5 + dist.get_rank()),
        lambda: OneBitAdam(parameters, 5, lr=0.1 * (1 + dist.get_rank())),
        lambda: ZeroOneAdam(parameters, 5, kappa=0),
        lambda: ZeroOneAdam(parameters, 5, double_every=-1),
        lambda: ZeroOneAdam(parameters, 5, max_interval=1.5),  # type: ignore[arg-type]
    ]
    said = []
    for make in wrong:
        with pytest.raises(gradwire.ConfigurationError) as caught:
            make()
        said.append(str(caught.value))
    optimizer = OneBitAdam(parameters, 5)
    with pytest.raises(gradwire.ConfigurationError) as caught:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    said.append(str(caught.value))
    backward(net, 0)
    net[0].weight.grad = net[0].weight.grad.to_sparse()
    with pytest.raises(gradwire.ConfigurationError) as caught:
        optimizer.step()
    said.append(str(caught.value))
    assert torch.equal(flat(net), before)
    optimizer.close()
    if dist.get_rank():
        with torch.no_grad():
            net[2].bias[1] += 1
    with pytest.raises(gradwire.ConfigurationError) as caught:
        OneBitAdam(parameters, 5)
    said.append(str(caught.value))
    OneBitAdam(parameters, 5, broadcast=True).close()
    assert same_everywhere(flat(net))
    return said


def test_what_cannot_be_is_refused(pool: Pool) -> None:
    wanted = [
        "freeze_step=0", "freeze_step=True", "lr=-1.0", "betas=(0.9, 1.0)", "eps=0.0", "floor=-0.1", "'nothing'",
        "momentum already", "ranks differ", "ranks differ", "kappa=0", "double_every=-1", "max_interval=1.5",
        "parameter group", "0.weight", "2.bias",
    ]  # fmt: skip
    for said in pool.run(2, refusals):
        assert [text for text in wanted if text not in said[wanted.index(text)]] == []
        assert len(said) == len(wanted)


def averages_of_tensors() -> list[bool]:
    net = network()
    sync = gradwire.Synchronizer(net.named_parameters(), "dense")
    backward(net, 0)
    before = [each.grad.clone() for each in net.parameters()]
    mine = torch.full((64, 20), 1.0 + dist.get_rank())
    averages = sync.average({"0.weight": mine})
    answers = [
        torch.equal(averages["0.weight"], torch.full((64, 20), 1.5)),
        all(not each.any() for name, each in averages.items() if name != "0.weight"),
        averages.keys() == dict(net.named_parameters()).keys(),
        all(torch.equal(each.grad, kept) for each, kept in zip(net.parameters(), before, strict=True)),
        torch.equal(mine, torch.full((64, 20), 1.0 + dist.get_rank())),
    ]
    for wrong in ({"0.weight": mine.T}, {"nothing": mine}):
        with pytest.raises(gradwire.ConfigurationError):
            sync.average(wrong)
    sync.close()
    return answers


def test_a_synchronizer_averages_other_tensors(pool: Pool) -> None:
    assert all(all(answers) for answers in pool.run(2, averages_of_tensors))


EPOCHS = 16


def accuracy(kind: str) -> float:
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
    sync, optimizer = None, None
    if kind == "adam":
        sync = gradwire.Synchronizer(net.named_parameters(), "dense")
        plain = torch.optim.Adam(net.parameters(), lr=0.003)
    elif kind == "one bit":
        plain = optimizer = OneBitAdam(net.named_parameters(), 60, lr=0.003)
    else:
        plain = optimizer = ZeroOneAdam(net.named_parameters(), 60, lr=0.003, double_every=60, max_interval=4)
    total = EPOCHS * (len(train) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(plain, 0.003, total_steps=total, cycle_momentum=False)
    shuffle = torch.Generator().manual_seed(3)
    for _ in range(EPOCHS):
        for batch in train[torch.randperm(len(train), generator=shuffle)].split(64):
            if len(batch) == 64:
                mine = batch[dist.get_rank() :: dist.get_world_size()]
                plain.zero_grad()
                nn.functional.cross_entropy(net(images[mine]), labels[mine]).backward()
                if sync is not None:
                    sync.synchronize()
                plain.step()
                schedule.step()
    if isinstance(optimizer, ZeroOneAdam):
        optimizer.synchronize()
    for each in (sync, optimizer):
        if each is not None:
            each.close()
    with torch.no_grad():
        return 100 * float((net(images[test]).argmax(1) == labels[test]).float().mean())


def test_accuracy_is_within_two_percent_of_adam(pool: Pool) -> None:
    adam, one_bit, zero_one = (pool.run(2, accuracy, kind)[0] for kind in ("adam", "one bit", "zero one"))
    assert adam > 94
    assert one_bit >= adam - 2
    assert zero_one >= adam - 2
