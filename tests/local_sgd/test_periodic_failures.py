"""Periodic averaging when something goes wrong: values that are not finite, workers that are missing or out of step."""

from __future__ import annotations

import logging
import re
import time
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire import GradwireError
from gradwire.local_sgd import fragments
from local_training import backward, nesterov, network, sgd, train
from models import flat, gathered, same_everywhere
from pool import ranks


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("dense", {}),
        ("topk", {"ratio": 0.1}),
        ("efsignsgd", {"moments": "average"}),
        ("powersgd", {"rank": 2, "fragments": 1}),
        ("threshold", {"threshold": 0.001}),
        ("ef21", {"ratio": 0.1}),
    ],
)
@pytest.mark.parametrize(("stretch", "layer"), [(1 << 20, 0), (500, 0), (500, 2)])
@ranks(2)
def test_nobody_takes_what_is_not_finite(method: str, options: dict[str, Any], stretch: int, layer: int) -> None:
    usual, fragments.STRETCH_ELEMENTS = fragments.STRETCH_ELEMENTS, stretch
    try:
        what_is_not_finite_is_dropped(method, options, layer)
    finally:
        fragments.STRETCH_ELEMENTS = usual


def what_is_not_finite_is_dropped(method: str, options: dict[str, Any], bad: int) -> None:
    net = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Linear(64, 30))
    torch.manual_seed(2)
    for layer in net:
        layer.reset_parameters()  # type: ignore[operator]
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    handle = gradwire.periodic(
        optimizer, every=2, method=method, parameters=net.named_parameters(), buffers=net, **options
    )
    train(net, optimizer, range(4))
    weights, statistics = flat(net), net[1].running_mean.clone()
    tensors = handle.state_dict()["tensors"]
    train(net, optimizer, range(4, 5))
    if dist.get_rank() == 1:
        with torch.no_grad():
            net[bad].weight[3, 3] = float("nan")
            optimizer.state[net[bad].weight]["exp_avg"][3, 3] = float("inf")
    with mock.patch.object(logging.getLogger("gradwire"), "warning") as warn:
        optimizer.step()
    assert warn.call_count == (dist.get_rank() == 0)
    assert torch.equal(flat(net), weights)
    assert torch.equal(net[1].running_mean, statistics)
    assert (handle.dropped, handle.syncs) == (1, 2)
    after = handle.state_dict()["tensors"]
    assert {field: set(kept) for field, kept in after.items()} == {field: set(kept) for field, kept in tensors.items()}
    assert all(torch.equal(kept, after[field][name]) for field, each in tensors.items() for name, kept in each.items())
    train(net, optimizer, range(6, 8))
    assert (handle.dropped, handle.syncs) == (1, 3)
    assert same_everywhere(flat(net))
    assert flat(net).isfinite().all()
    handle.close()


@pytest.mark.parametrize(
    "options",
    [{}, {"cut": "layers", "delay": 2}, {"cut": "strided", "eager": True}, {"cut": "layers", "moments": "reset"}],
    ids=str,
)
@ranks(2)
def test_fragments_survive_a_step_that_is_not_finite(options: dict[str, Any]) -> None:
    """What is not finite in one of them would be so in all others, in every step from then on."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Linear(64, 30))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    handle = gradwire.periodic(optimizer, every=6, fragments=3, method="topk", ratio=0.1, buffers=net, **options)
    train(net, optimizer, range(8))
    if dist.get_rank() == 1:
        optimizer.zero_grad()
        net(torch.full((16, 20), torch.nan)).sum().backward()
    optimizer.step()
    train(net, optimizer, range(9, 21))
    dropped = handle.dropped
    assert 1 <= dropped <= 3
    train(net, optimizer, range(21, 40))
    handle.synchronize()
    assert handle.dropped == dropped
    assert same_everywhere(flat(net))
    kept = [each for state in optimizer.state.values() for each in state.values()]
    for each in [*net.parameters(), *net.buffers(), *kept]:
        assert each.isfinite().all()
    handle.close()


@pytest.mark.parametrize(
    ("kind", "value", "options"),
    [
        (torch.optim.Adam, float("inf"), {}),
        (torch.optim.Adam, 1e25, {"moments": "average"}),  # of which the square is infinite
        (torch.optim.Adafactor, float("inf"), {}),
        (torch.optim.Adafactor, float("inf"), {"fragments": 2}),
    ],
)
@ranks(2)
def test_an_optimizer_is_sound_again_after_an_average_that_is_dropped(
    kind: type[torch.optim.Optimizer], value: float, options: dict[str, Any]
) -> None:
    net = network()
    optimizer = kind(net.parameters(), lr=1e-2)  # type: ignore[call-arg]
    handle = gradwire.periodic(optimizer, every=4, **options)
    train(net, optimizer, range(4))
    weights = flat(net)
    for step in range(4, 40):
        backward(net, step)
        if step == 5 and dist.get_rank() == 1:
            net[0].weight.grad[3, 3] = value
        optimizer.step()
    handle.synchronize()
    assert 1 <= handle.dropped <= options.get("fragments", 1)
    kept = [each for state in optimizer.state.values() for each in state.values()]
    assert all(each.isfinite().all() for each in kept)
    assert same_everywhere(flat(net))
    assert 0 < (flat(net) - weights).abs().max() < 1
    handle.close()


def eager_with_a_buffer() -> tuple[nn.Sequential, torch.optim.Optimizer, gradwire.Periodic]:
    """A model that has a buffer of zeros, ``count``, and what averages it with eager updates."""
    net = network()
    net.register_buffer("count", torch.zeros(3))
    optimizer = sgd(net)
    handle = gradwire.periodic(optimizer, every=2, eager=True, buffers=net, parameters=net.named_parameters())
    return net, optimizer, handle


@ranks(2)
def test_buffers_of_eager_updates_are_not_set_back_to_the_beginning() -> None:
    """But for what of them is not finite, whether all parameters are or not."""
    rank = dist.get_rank()
    net, optimizer, handle = eager_with_a_buffer()
    for step in range(8):
        net.count += 1 + rank
        if step == 3 and rank == 1:
            net.count[2] = torch.nan
            net[2].weight.data[0, 0] = torch.nan
        train(net, optimizer, range(step, step + 1))
    assert handle.dropped == 1
    assert net.count.tolist() == [8 + 8 * rank, 8 + 8 * rank, 8]
    net.count[1] = torch.inf if rank else 8
    train(net, optimizer, range(8, 10))
    assert net.count.tolist() == [8 + 8 * rank, 0 if rank else 8, 8]
    handle.synchronize()
    assert net.count.tolist() == [12, 4, 8]
    assert handle.dropped == 1
    handle.close()


@ranks(2)
def test_buffers_are_averaged_at_last_where_an_eager_average_is_dropped() -> None:
    """Parameters are the same on all ranks by that; buffers went on, and ``synchronize()`` averages them."""
    rank = dist.get_rank()
    net, optimizer, handle = eager_with_a_buffer()
    net.count += 1 + rank
    net[2].weight.data[0, 0] += torch.nan if rank else 0
    train(net, optimizer, range(2))
    handle.synchronize()
    assert handle.dropped == 1
    assert net.count.tolist() == [1.5] * 3
    assert torch.equal(flat(net), flat(network()))
    handle.close()


@ranks(2)
def test_weights_that_one_rank_puts_back_are_averaged_at_last() -> None:
    """As those of its best epoch, where the last step ended a period and all had the same."""
    for options in ({}, {"outer": nesterov}, {"fragments": 2}):
        net = network()
        optimizer = sgd(net)
        handle = gradwire.periodic(optimizer, every=2, **options)
        train(net, optimizer, range(1))
        best = {name: each.clone() for name, each in net.state_dict().items()}
        train(net, optimizer, range(1, 4))
        handle.synchronize()
        syncs = handle.syncs
        handle.synchronize()
        assert handle.syncs == syncs
        if dist.get_rank():
            net.load_state_dict(best)
        expected = torch.stack(gathered(flat(net))).mean(0)
        handle.synchronize()
        assert same_everywhere(flat(net))
        if "outer" not in options:
            torch.testing.assert_close(flat(net), expected)
        assert handle.syncs > syncs
        handle.close()


@ranks(2)
def test_buffers_that_change_after_the_last_step_are_averaged_at_last() -> None:
    """As by forward passes that no step followed; parameters, and an outer optimizer's momentum, stay as they are."""
    for options in ({}, {"outer": nesterov}, {"fragments": 2}, {"eager": True}):
        net = network()
        net.register_buffer("count", torch.zeros(3))
        optimizer = sgd(net)
        handle = gradwire.periodic(optimizer, every=2, buffers=net, verify_every=1, **options)
        train(net, optimizer, range(4))
        handle.synchronize()
        before, syncs = flat(net), handle.syncs
        net.count += 1 + dist.get_rank()
        handle.synchronize()
        assert net.count.tolist() == [1.5] * 3
        net.count[dist.get_rank()] = torch.nan
        handle.synchronize()
        assert net.count.tolist() == [1.5] * 3
        assert torch.equal(flat(net), before)
        assert (handle.dropped, handle.syncs) == (1, syncs)
        handle.close()


@ranks(2)
def test_fragments_that_are_averaged_at_once_are_dropped_at_once() -> None:
    """However late the wire comes to measure what they changed."""
    usual = fragments.Stretch.measure

    def measure(stretch: fragments.Stretch) -> None:
        time.sleep(0.1)
        usual(stretch)

    net = network()
    optimizer = sgd(net)
    handle = gradwire.periodic(optimizer, every=3, fragments=3, warmup_steps=2)
    with mock.patch.object(fragments.Stretch, "measure", measure):
        backward(net, 0, torch.nan if dist.get_rank() else 1.0)
        optimizer.step()
    assert (handle.dropped, handle.syncs) == (3, 0)
    train(net, optimizer, range(1, 5))
    assert handle.dropped == 3
    handle.close()


@ranks(2)
def test_a_worker_that_does_not_come() -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    net = network()
    optimizer = sgd(net)
    handle = gradwire.periodic(optimizer, every=2, process_group=group)
    if dist.get_rank() == 0:
        with pytest.raises(Exception, match=r"(?i)time|connection|closed"):
            train(net, optimizer, range(2))
        with pytest.raises(GradwireError, match="an earlier step failed"):
            train(net, optimizer, range(4))
    dist.barrier()
    handle.close()


@ranks(2)
def test_an_average_that_fails_half_way() -> None:
    """Leaves the model where local steps took it, whatever of the average had landed."""
    net = nn.Sequential(nn.Linear(20, 64), nn.Linear(64, 30))
    torch.manual_seed(2)
    for layer in net:
        layer.reset_parameters()  # type: ignore[operator]
    optimizer = sgd(net)
    local = []
    optimizer.register_step_post_hook(lambda *_: local.append(flat(net)))
    group = dist.new_group()
    landed, usual = [], fragments.Stretch.land

    def land(stretch: fragments.Stretch) -> None:
        landed.append(stretch)
        if len(landed) == 3:
            raise RuntimeError("the third does not land")
        usual(stretch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fragments, "STRETCH_ELEMENTS", 1)
        handle = gradwire.periodic(optimizer, every=2, method="qsgd", process_group=group)
        train(net, optimizer, range(4))
        last = flat(net)
        patch.setattr(fragments.Stretch, "land", land)
        with pytest.raises(RuntimeError, match="the third does not land"):
            train(net, optimizer, range(4, 6))
    assert len(landed) == 3
    assert torch.equal(flat(net), local[-1])
    assert torch.equal(handle._fragments[0].anchor, last)
    handle.close()
    again = gradwire.periodic(optimizer, every=2, method="qsgd", broadcast=True)
    train(net, optimizer, range(6, 8))
    assert again.syncs == 1
    assert same_everywhere(flat(net))
    again.close()


@ranks(2)
def test_periods_that_differ() -> None:
    """What a function gives for later periods is known only then, and so is a step that a rank has left out."""
    rank = dist.get_rank()
    net = network()
    handle = gradwire.periodic(sgd(net), every=lambda period: 2 + period * rank)
    train(net, handle._optimizer, range(3))
    with pytest.raises(GradwireError, match="different local steps: 4, 5, rank by rank"):
        train(net, handle._optimizer, range(3, 5))
    dist.barrier()
    handle.close()


@pytest.mark.parametrize(
    ("steps", "options"),
    [
        ((8, 9), {}),
        ((6, 7), {"fragments": 2, "method": "topk", "ratio": 0.1}),
        ((4, 5), {"fragments": 2, "cut": "layers", "delay": 2}),
        ((9, 10), {"eager": True, "verify_every": 1}),
    ],
)
@ranks(2)
def test_a_last_step_that_a_rank_leaves_out(steps: tuple[int, int], options: dict[str, Any]) -> None:
    """All are told, also where on some ranks there would be nothing to average, or less."""
    net = network()
    handle = gradwire.periodic(sgd(net), every=4, **options)
    train(net, handle._optimizer, range(steps[dist.get_rank()]))
    with pytest.raises(GradwireError, match=f"different local steps: {steps[0]}, {steps[1]}, rank by rank"):
        handle.synchronize()
    dist.barrier()
    handle.close()


@ranks(2)
def test_a_last_step_that_a_rank_leaves_out_while_another_averages() -> None:
    """None of them waits."""
    net = network()
    handle = gradwire.periodic(sgd(net), every=4, fragments=2, method="topk", ratio=0.1)
    train(net, handle._optimizer, range(5))
    goes_on = partial(train, net, handle._optimizer, range(5, 6)) if dist.get_rank() == 0 else handle.synchronize
    with pytest.raises(GradwireError, match=r"different local steps: 6, 5|the connection was closed"):
        goes_on()
    dist.barrier()
    handle.close()


@pytest.mark.parametrize(
    ("without", "said"),
    [
        ("0.weight 0.bias", "ranks have different optimizer state or buffers to average"),
        ("2.weight 2.bias", "ranks have different optimizer state or buffers to average"),
        ("0.weight 0.bias 2.weight 2.bias", "'average' has nothing to average: Adam keeps nothing|^WireError"),
    ],
)
@ranks(2)
def test_moments_that_a_rank_does_not_have(without: str, said: str) -> None:
    """Every rank is told where one has moments to average and another, whose gradients were missing, has none."""
    net = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 5))
    optimizer = torch.optim.Adam(net.parameters())
    group = dist.new_group(timeout=timedelta(seconds=20))
    periodic = {"fragments": 2, "cut": "layers", "moments": "average", "process_group": group}
    handle = gradwire.periodic(optimizer, every=2, **periodic)  # type: ignore[arg-type]

    def trained() -> None:
        for _ in range(4):
            optimizer.zero_grad()
            net(torch.ones(4, 20)).square().mean().backward()
            for name in without.split() if dist.get_rank() else ():
                net.get_parameter(name).grad = None
            optimizer.step()

    with pytest.raises(GradwireError) as raised:
        trained()
    assert re.search(said, f"{type(raised.value).__name__}: {raised.value}")
    handle.close()


@ranks(2)
def test_no_moments_to_average() -> None:
    net = network()
    handle = gradwire.periodic(sgd(net, momentum=0.0), every=2, moments="average")
    with pytest.raises(GradwireError, match="moments='average' has nothing to average: SGD keeps nothing"):
        train(net, handle._optimizer, range(2))
    handle.close()
