"""Compressed Adam in whole runs: gone on with by other workers, and as accurate as Adam."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import digits
import gradwire
from compressed_adam import KINDS, bytes_of, made, meet, same
from local_training import network, train
from models import flat, same_everywhere
from pool import Pool, ranks

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


def accuracy(kind: str, options: dict[str, int], rate: float = 0.003) -> float:
    net = digits.network()
    optimizer = made(kind, net, lr=rate, **options)

    def give(images: Tensor, labels: Tensor) -> None:
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        nn.functional.cross_entropy(net(images[mine]), labels[mine]).backward()

    digits.train(optimizer, rate, give)
    meet(optimizer)
    optimizer.close()
    return digits.accuracy(net)


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


@pytest.mark.parametrize("kind", KINDS)
@ranks(1)
def test_a_state_without_what_compression_remembers_says_what_left_it_out(kind: str) -> None:
    net = network()
    optimizer = made(kind, net.named_parameters(), freeze_step=1)
    train(net, optimizer, range(3))
    state = get_optimizer_state_dict(net, optimizer)
    with pytest.raises(gradwire.ConfigurationError, match=r"no part named 'gradwire': .*; save optimizer\.state_dict"):
        set_optimizer_state_dict(net, optimizer, state)
    optimizer.close()


@pytest.mark.parametrize("kind", KINDS)
@ranks(1)
def test_an_optimizer_is_not_copied(kind: str) -> None:
    """A copy would have no wire; another made with its state goes on."""
    optimizer = made(kind, network().named_parameters(), freeze_step=1)
    for kept in (pickle.dumps, copy.deepcopy):
        with pytest.raises(pickle.PicklingError, match=rf"{type(optimizer).__name__} cannot be .* save its state_dict"):
            kept(optimizer)
    copy.deepcopy(optimizer.state_dict())
    optimizer.close()


@ranks(2)
def test_a_momentum_without_a_rate_is_the_same_everywhere() -> None:
    """0/1 Adam sends momenta as moves, and there are none at a rate of 0; states can be redistributed all the same."""
    net = network()
    named = list(net.named_parameters())
    groups = [{"params": named[:3]}, {"params": named[3:], "lr": 0.0}]
    optimizer = made("zero one", groups, method="dense")
    train(net, optimizer, range(STOP))
    meet(optimizer)
    assert all(same_everywhere(optimizer.state[each]["exp_avg"]) for each in net.parameters())
    optimizer.close()
