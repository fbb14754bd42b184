"""Audits: what they say is true, they change nothing, and they are counted."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from catalogue import OPTIONS
from gradwire import ConfigurationError, methods
from gradwire.engine.guards.audit import Deviation
from gradwire.wire.meter import all_reduce_bytes
from pool import Pool, ranks

STEPS = 3


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10))


def gradients(net: nn.Module, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return {name: torch.randn(each.shape, generator=generator) for name, each in net.named_parameters()}


def averages(method: str, options: dict[str, Any], audit_every: int) -> tuple[bytes, gradwire.Stats]:
    """Averages of several buckets that are fused, whose rounding depends on what they are fused with."""
    net = network()
    model = DistributedDataParallel(net, bucket_cap_mb=0.002)
    handle = gradwire.compress(model, method, fuse_bytes=4096, audit_every=audit_every, **options)
    landed = b""
    for step in range(STEPS):
        model.zero_grad()
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        model(torch.randn(8, 48, generator=generator)).square().mean().backward()
        landed += b"".join(p.grad.numpy().tobytes() for p in net.parameters() if p.grad is not None)
    handle.close()
    return landed, handle.stats()


@ranks(3)
def test_an_audit_changes_no_bit_and_is_metered() -> None:
    """Of one method for each kind of request and route: an audit does not ask which it is."""
    numel = sum(parameter.numel() for parameter in network().parameters())
    firsts = {route: name for name in reversed(methods.names()) for route in methods.get(name).routes}
    for name in sorted({*firsts.values(), "dense", "powersgd", "scalecom", "terngrad", "threshold", "topk"}):
        options = OPTIONS.get(name, [{}])[0]
        plain, before = averages(name, options, 0)
        audited, after = averages(name, options, 2)
        assert audited == plain, name
        # Steps 0 and 2 were audited; each bucket's copy is a collective of its own, rounded down to whole bytes.
        further = after.wire_bytes - before.wire_bytes
        assert 0 <= 2 * all_reduce_bytes(4 * numel, dist.get_world_size()) - further < 20, name
        assert before.audit is None
        assert after.audit is not None
        assert after.audit.step == 2


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.view(-1) for tensor in tensors.values()]).double()


def an_audit_says_what_is(granularity: str) -> list[Any]:
    net = network()
    sync = gradwire.Synchronizer(net.named_parameters(), "topk", ratio=0.1, granularity=granularity, audit_every=1)
    for step in range(STEPS):
        own = gradients(net, step)
        dense = {name: tensor.clone() for name, tensor in own.items()}
        for name, parameter in net.named_parameters():
            parameter.grad = own[name]
            dist.all_reduce(dense[name])
            dense[name] /= dist.get_world_size()
        sync.synchronize()
        averaged = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        kept = sync.state_dict()["tensors"]["residual"]
        audit = sync.audits()[-1]
        assert audit.step == step
        assert list(audit.layers) == list(dense)
        for name, found in audit.layers.items():
            parts = {name: dense[name]}, {name: averaged[name]}, {name: kept.get(name, torch.zeros(1))}
            assert_says(found, *map(flat, parts))
        assert_says(audit.whole, flat(dense), flat(averaged), flat(kept))
        assert audit == sync.stats().audit
    assert len(sync.audits()) == STEPS
    sync.close()
    return [(a.whole.cosine, a.whole.relative_error) for a in sync.audits()]


def assert_says(found: Deviation, dense: torch.Tensor, averaged: torch.Tensor, residual: torch.Tensor) -> None:
    cosine = float(dense @ averaged / dense.norm() / averaged.norm())
    assert found.cosine == pytest.approx(cosine, abs=1e-6)
    assert found.relative_error == pytest.approx(float((averaged - dense).norm() / dense.norm()), abs=1e-6)
    assert found.residual_norm == pytest.approx(float(residual.norm()), rel=1e-6)


@pytest.mark.parametrize("granularity", ["layer", "model"])
def test_an_audit_says_what_is(pool: Pool, granularity: str) -> None:
    first, second = pool.run(2, an_audit_says_what_is, granularity)
    assert first == second
    assert all(0.2 < cosine < 0.9 for cosine, _ in first)


@ranks(2)
def test_an_audit_tells_what_other_memories_keep_of_what_was_not_sent() -> None:
    """A filtered residual by another name; and not EF21's estimate, which is as large as the gradient."""
    for method, field in (("loco", "residual.filtered"), ("ef21", None)):
        net = network()
        sync = gradwire.Synchronizer(net.named_parameters(), method, audit_every=1)
        for step in range(STEPS):
            for parameter, own in zip(net.parameters(), gradients(net, step).values(), strict=True):
                parameter.grad = own
            sync.synchronize()
        tensors = sync.state_dict()["tensors"]
        kept = float(flat(tensors[field]).norm()) if field else 0.0
        assert sync.audits()[-1].whole.residual_norm == pytest.approx(kept, rel=1e-6)
        assert (kept > 0) == (field is not None)
        sync.close()


class Writer:
    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.written.append((tag, scalar_value, global_step))


@ranks(2)
def test_audits_are_logged_and_written() -> None:
    lines: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gradwire")
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    net = network()
    sync = gradwire.Synchronizer(net.named_parameters(), "qsgd", bits=4, audit_every=2)
    writer = Writer()
    for _ in range(5):
        for name, gradient in gradients(net, 0).items():
            net.get_parameter(name).grad = gradient
        sync.synchronize()
    state = sync.state_dict()
    sync.write(writer)
    audits = [(tag, step) for tag, _, step in writer.written if tag == "gradwire/cosine"]
    assert audits == [("gradwire/cosine", step) for step in (0, 2, 4)]
    assert ("gradwire/wire_bytes", sync.stats().wire_bytes, 5) in writer.written
    assert all(isinstance(value, (int, float)) for _, value, _ in writer.written)
    numbers = sync.stats().as_dict("gradwire/")
    assert numbers["gradwire/ratio"] == sync.stats().ratio > 1
    assert {(name, number, 5) for name, number in numbers.items()} <= set(writer.written)
    writer.written.clear()
    sync.write(writer, layers=True)
    assert not any("cosine" in tag for tag, _, _ in writer.written)
    sync.close()  # the thread has ended, so that its last line is there
    assert len(lines) == (3 if dist.get_rank() == 0 else 0)
    assert all(line.startswith("step ") and "relative error 0." in line for line in lines)
    logger.removeHandler(listener)

    again = gradwire.Synchronizer(net.named_parameters(), "qsgd", bits=4, audit_every=2)
    again.load_state_dict(state)
    for _ in range(2):
        again.synchronize()
    again.write(writer, layers=True)
    assert [step for tag, _, step in writer.written if tag == "gradwire/0.weight/relative_error"] == [6]
    again.close()


@ranks(2)
def test_audits_of_steps_that_are_taken_anew() -> None:
    """After a rollback, and from an earlier state, what was found of them first is no audit of this run."""
    net, writer = network(), Writer()
    sync = gradwire.Synchronizer(net, "topk", ratio=0.1, audit_every=2, rollback=True)

    def step(seed: int, factor: float = 1.0) -> None:
        for name, gradient in gradients(net, seed).items():
            net.get_parameter(name).grad = gradient * factor
        sync.synchronize()

    def written() -> list[tuple[float, int]]:
        writer.written.clear()
        sync.write(writer)
        return [(value, step) for tag, value, step in writer.written if tag == "gradwire/cosine"]

    for seed in range(2):
        step(seed)
    state = sync.state_dict()
    step(2, math.nan)
    assert [math.isnan(cosine) for cosine, _ in written()] == [False, True]
    bad = sync.stats()
    assert bad.since(bad).audit is None
    for seed in range(2, 7):
        step(seed)
    first, before = sync.audits(), sync.stats()
    assert [audit.step for audit in first] == [0, 2, 4, 6]
    assert written() == [(audit.whole.cosine, audit.step) for audit in first[1:]]
    sync.load_state_dict(state)
    for seed in range(12, 15):
        step(seed)
    assert [audit.step for audit in sync.audits()] == [0, 2, 4]
    newest = sync.stats().audit
    assert newest == sync.audits()[-1] == sync.stats().since(before).audit
    assert newest.step == 4
    assert newest != first[2]
    assert written() == [(audit.whole.cosine, audit.step) for audit in sync.audits()[1:]]
    sync.close()


@ranks(2)
def test_audits_that_are_refused() -> None:
    net = network()
    for audit_every in (-1, 2.5, True, "often"):
        model = DistributedDataParallel(net)
        with pytest.raises(ConfigurationError, match=r"audit_every=.* is out of range; choose a whole number of steps"):
            gradwire.compress(model, "topk", audit_every=audit_every)  # type: ignore[arg-type]
        gradwire.compress(model, "topk")
    with pytest.raises(ConfigurationError, match="rank 0 has 'audit_every=5', rank 1 has 'audit_every=6'"):
        gradwire.Synchronizer(net.named_parameters(), "topk", audit_every=5 + dist.get_rank())


def test_deviations_of_nothing() -> None:
    nothing = Deviation.together([])
    assert math.isnan(nothing.cosine)
    assert math.isnan(nothing.relative_error)
