"""Periodic averaging with checksums and digests: what parts the ranks is found on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from catalogue import OPTIONS, has_momentum
from flipping import Flipping
from gradwire import methods
from gradwire.engine.guards import Guard
from gradwire.engine.unit import Unit
from gradwire.wire import CheckedTransport, ProcessGroupTransport
from local_training import nesterov, network, sgd, train
from models import flat, same_everywhere
from pool import Pool, ranks

Spoil = Callable[[gradwire.Periodic, nn.Module], None]

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("dense", {}),
    ("topk", {"ratio": 0.1}),
    ("qsgd", {"fragments": 2, "cut": "strided"}),
    ("efsignsgd", {"outer": nesterov, "delay": 1, "mix": 0.5}),
    ("qsgd", {"outer": nesterov, "eager": True, "fragments": 2}),
    ("threshold", {"threshold": 0.001, "moments": "average"}),
    ("powersgd", {"rank": 2, "fragments": 2, "cut": "layers"}),
]


def normalised() -> nn.Module:
    net = network()
    return nn.Sequential(*net[:2], nn.BatchNorm1d(64), *net[2:])


def attached(method: str, options: dict[str, Any]) -> tuple[nn.Module, gradwire.Periodic]:
    net = normalised()
    every = {"every": 2, "method": method, "parameters": net.named_parameters(), "buffers": net}
    return net, gradwire.periodic(sgd(net, momentum=0.9), **{**every, **options})


@ranks(3)
def test_verified_averages_are_the_same_bits() -> None:
    for method, options in METHODS:
        found, sent = [], []
        for further in ({}, {"verify_every": 1}, {"verify_every": 3}):
            net, handle = attached(method, {**options, **further})
            train(net, handle._optimizer, range(9))
            handle.synchronize()
            assert same_everywhere(flat(net)), method
            found.append(flat(net))
            sent.append(handle.stats().wire_bytes)
            handle.close()
        assert torch.equal(found[0], found[1]), method
        assert torch.equal(found[0], found[2]), method
        assert sent[0] < sent[2] < sent[1], method


def flipped_bits() -> list[str]:
    """What each method's average ends in on this rank when bits are changed on their way."""
    ends = []
    for method in methods.names():
        made = methods.get(method)
        memory = {"memory": "residual"} if has_momentum(made) else {}
        outer = {"outer": nesterov} if made.why_no_mean else {}
        net, handle = attached(method, {**OPTIONS.get(method, [{}])[0], **memory, **outer, "verify_every": 1})
        line = handle.wire._scheduler._transport
        assert isinstance(line, CheckedTransport)
        assert isinstance(line._inner, ProcessGroupTransport)
        line._inner = flipping = Flipping(line._inner._group)
        train(net, handle._optimizer, range(4))
        handle.synchronize()
        flipping.sender, taken = 1, handle.syncs
        with pytest.raises((gradwire.PayloadError, gradwire.WireError)) as raised:
            train(net, handle._optimizer, range(4, 8))
        assert handle.syncs == taken, method
        with pytest.raises(gradwire.GradwireError, match="an earlier step failed"):
            train(net, handle._optimizer, range(8, 12))
        ends.append(str(raised.value))
        dist.barrier()
        handle.close()
    return ends


class Spoiled(Guard):
    """One rank's memory fails: one value of an average is another there."""

    def after_decode(self, unit: Unit, average: torch.Tensor) -> None:
        for slot in unit.slots:
            if slot.name.startswith("3.weight"):
                average[slot.offset + 5] += 0.01


def spoilt_average(handle: gradwire.Periodic, net: nn.Module) -> None:
    handle.engine.guards.append(Spoiled())


def spoilt_anchor(handle: gradwire.Periodic, net: nn.Module) -> None:
    for fragment in handle._fragments:
        for name, anchor in fragment.named(fragment.anchor):
            if name.startswith("3.weight"):
                anchor[-1].view(torch.int32).bitwise_xor_(1)


def spoilt_buffer(handle: gradwire.Periodic, net: nn.Module) -> None:
    assert handle._buffers is not None
    handle._buffers.last["2.running_var"][7] += 1


def other_outer(handle: gradwire.Periodic, net: nn.Module) -> None:
    assert handle.outer is not None
    handle.outer.param_groups[0]["lr"] *= 1.0001


def spoilt_parameter(handle: gradwire.Periodic, net: nn.Module) -> None:
    """That is as good as a local step."""
    with torch.no_grad():
        net.get_parameter("3.weight")[2] += 0.1


@ranks(3)
def test_local_changes_and_dropped_averages_are_no_drift() -> None:
    for method, options in METHODS:
        net, handle = attached(method, {**options, "verify_every": 1})
        train(net, handle._optimizer, range(5))
        if dist.get_rank() == 1:
            spoilt_parameter(handle, net)
        train(net, handle._optimizer, range(5, 10))
        with torch.no_grad():
            net.get_parameter("0.weight")[0, dist.get_rank()] = float("nan")
        train(net, handle._optimizer, range(10, 14))
        handle.synchronize()
        assert handle.dropped
        assert same_everywhere(flat(net)), method
        handle.close()


@ranks(2)
def test_all_ranks_verify_or_none() -> None:
    net = network()
    with pytest.raises(gradwire.ConfigurationError, match=r"rank 0 has 'verify_every=0', rank 1 has 'verify_every=1'"):
        gradwire.periodic(sgd(net), verify_every=dist.get_rank())


def test_flipped_bits_are_found(pool: Pool) -> None:
    for ends in zip(*pool.run(2, flipped_bits), strict=True):
        assert any("does not fit its checksum" in end for end in ends), ends


DRIFTS = pytest.mark.parametrize(
    ("spoil", "which", "cases"),
    [
        (spoilt_average, r"3\.weight", METHODS),
        (spoilt_anchor, r"3\.weight", METHODS),
        (spoilt_buffer, r"buffer 2\.running_var", METHODS[::2]),
        (other_outer, "0", [METHODS[3], ("dense", {"outer": nesterov})]),
    ],
)


@DRIFTS
@ranks(3)
def test_every_rank_raises_when_ranks_drift(spoil: Spoil, which: str, cases: list[tuple[str, dict[str, Any]]]) -> None:
    for number, (method, options) in enumerate(cases):
        net, handle = attached(method, {**options, "verify_every": 1 + number % 3})
        train(net, handle._optimizer, range(4))
        handle.synchronize()
        if dist.get_rank() == 1:
            spoil(handle, net)
        match = rf"after \d+ averages of fragment \d what they left is not .*'{which}.*ranks 0, 2 against rank 1"
        with pytest.raises(gradwire.DivergenceError, match=match):
            train(net, handle._optimizer, range(4, 13))
        with pytest.raises(gradwire.GradwireError, match="an earlier step failed"):
            train(net, handle._optimizer, range(13, 17))
        handle.close()


@DRIFTS
@ranks(3)
def test_the_last_average_is_compared_when_all_synchronize(
    spoil: Spoil, which: str, cases: list[tuple[str, dict[str, Any]]]
) -> None:
    for method, options in cases:
        net, handle = attached(method, {**options, "verify_every": 100})
        train(net, handle._optimizer, range(4))
        handle.synchronize()
        if dist.get_rank() == 1:
            spoil(handle, net)
        train(net, handle._optimizer, range(4, 5))
        match = rf"after \d+ averages of fragment \d what they left is not .*'{which}.*ranks 0, 2 against rank 1"
        with pytest.raises(gradwire.DivergenceError, match=match):
            handle.synchronize()
        with pytest.raises(gradwire.GradwireError, match="an earlier step failed"):
            handle.synchronize()
        handle.close()
