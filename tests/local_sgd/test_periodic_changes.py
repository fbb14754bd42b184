"""Options of what is sent between periods change while training goes on."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire import ConfigurationError
from local_training import backward, network, sgd, train
from models import flat, gathered, same_everywhere
from pool import ranks


@ranks(2)
def test_options_change_between_averages() -> None:
    """After two averages, which is 8 local steps; a run that goes on gives the same bits."""
    found = []
    for schedule in (False, True):
        net = network()
        optimizer = sgd(net)
        ratio = {0: 0.2, 2: 0.05} if schedule else 0.2
        handle = gradwire.periodic(optimizer, every=4, method="topk", ratio=ratio, memory="residual")
        train(net, optimizer, range(8))
        if not schedule:
            handle.change(ratio=0.05)
        train(net, optimizer, range(8, 12))
        state, weights = handle.state_dict(), {name: each.clone() for name, each in net.state_dict().items()}
        train(net, optimizer, range(12, 16))
        assert same_everywhere(flat(net))
        found.append(flat(net))
        handle.close()

        net.load_state_dict(weights)
        optimizer = sgd(net)
        again = gradwire.periodic(optimizer, every=4, method="topk", ratio=ratio, memory="residual")
        if not schedule:
            again.change(ratio=0.05)
        again.load_state_dict(state)
        train(net, optimizer, range(12, 16))
        assert torch.equal(flat(net), found[-1])
        again.close()
    assert torch.equal(*found)


@ranks(2)
def test_a_pause_of_fragments() -> None:
    """They count their averages one by one, and wherever a run stops it goes on with the same bits."""

    def attached() -> tuple[nn.Module, torch.optim.Optimizer, gradwire.Periodic]:
        net = network()
        optimizer = sgd(net)
        return net, optimizer, gradwire.periodic(optimizer, every=3, method="qsgd", fragments=3)

    found = []
    for stops in (range(0), range(12)):
        net, optimizer, handle = attached()
        for step in range(12):
            if step == 1:
                handle.pause()
            if step == 8:
                handle.resume()
            if step in stops:
                state, weights = handle.state_dict(), net.state_dict()
                handle.close()
                net, optimizer, handle = attached()
                net.load_state_dict(weights)
                handle.load_state_dict(state)
            backward(net, step, torch.nan if step == 4 else 1.0)
            optimizer.step()
        assert handle.dropped == 1
        handle.close()
        found.append(flat(net))
    assert torch.equal(*found)


@ranks(2)
def test_averages_of_a_pause_and_dropped_ones_do_not_put_a_schedule_on() -> None:
    net = network()
    optimizer = sgd(net)
    ratios = []
    with closing(gradwire.periodic(optimizer, every=1, method="topk", ratio={0: 0.2, 1: 0.05})) as handle:
        handle.pause()
        train(net, optimizer, range(2))
        handle.resume()
        for step in range(2, 5):
            backward(net, step, torch.nan if step == 2 else 1.0)
            optimizer.step()
            ratios.append(handle.engine.now.rules[0].method.ratio)  # type: ignore[attr-defined]
        assert handle.dropped == 1
    assert ratios == [0.2, 0.2, 0.05]


@ranks(2)
def test_owners_of_whole_rows_take_turns_with_others() -> None:
    """What is owed in shares of one kind goes along with the first average in the others."""
    net = network()
    before = flat(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    options = {"granularity": "model", "route": "sharded"}
    handle = gradwire.periodic(optimizer, every=2, method="subspace", bits=1.0, **options)
    moved = torch.zeros_like(before)
    again = {**options, "bits": 1.0}
    changes = [("efsignsgd", options), ("subspace", again), ("dense", {"granularity": "model"}), None]
    for step, change in enumerate(changes):
        for _ in range(2):
            noise = torch.Generator().manual_seed(10 * step + dist.get_rank())
            for each in net.parameters():
                each.grad = torch.randn(each.shape, generator=noise)
            moved += 0.01 * torch.stack(gathered(torch.cat([each.grad.flatten() for each in net.parameters()]))).mean(0)
            optimizer.step()
        if change is not None:
            handle.change(change[0], **change[1])
    torch.testing.assert_close(before - flat(net), moved, rtol=1e-4, atol=1e-5)
    handle.close()


@ranks(2)
def test_stretches_stay_as_they_were_cut() -> None:
    net = network()
    handle = gradwire.periodic(sgd(net), every=4, method="qsgd", fragments=2)
    with pytest.raises(ConfigurationError, match="'block:256' cannot take the place of 'block:512', by which"):
        handle.change(granularity="block:256")
    with pytest.raises(ConfigurationError, match="momentum of gradients"):
        handle.change("topk", granularity="block:512", memory="dgc")
    with pytest.raises(ConfigurationError, match="fragments=2 count their averages one by one"):
        handle.change(bits={0: 4, 2: 8})
    with pytest.raises(ConfigurationError, match="averaged periodically by one method"):
        handle.change({"*": "dense"})
    handle.change(bits=8)
    assert "bits=8" in repr(handle)
    handle.close()
    with pytest.raises(ConfigurationError, match="fragments=2 count their averages one by one"):
        gradwire.periodic(sgd(net), every=4, method="qsgd", fragments=2, bits={0: 4, 2: 8})
