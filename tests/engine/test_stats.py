"""What is counted in all, and since an earlier count."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire import Stats
from pool import ranks


@ranks(2)
def test_what_was_counted_since() -> None:
    net = nn.Linear(60, 50)
    sync = gradwire.Synchronizer(net.named_parameters(), "qsgd", bits=4, audit_every=2)
    noise = torch.Generator().manual_seed(dist.get_rank())
    start = sync.stats()
    assert start.since(start) == start == Stats(0, 0, 0, dict.fromkeys(start.seconds, 0.0))
    seen = [start]
    for _ in range(3):
        for each in net.parameters():
            each.grad = torch.randn(each.shape, generator=noise)
        sync.synchronize()
        seen.append(sync.stats())
    steps = [now.since(before) for before, now in pairwise(seen)]
    total = seen[-1].since(start)
    assert [each.steps for each in steps] == [1, 1, 1]
    assert len({each.dense_bytes for each in steps}) == 1
    assert sum(each.wire_bytes for each in steps) == total.wire_bytes == seen[-1].wire_bytes > 0
    for stage, seconds in seen[-1].seconds.items():
        torch.testing.assert_close(sum(each.seconds[stage] for each in steps), seconds)
    assert [each.audit and each.audit.step for each in steps] == [0, None, 2]
    assert steps[1].as_dict("gradwire/recent/")["gradwire/recent/ratio"] == steps[1].ratio > 1
    sync.close()


def test_one_line() -> None:
    stats = Stats(12, 40_000_000, 1_250_000, {"encode": 0.5, "wire": 1.25, "decode": 0.25})
    assert str(stats) == (
        "12 steps, 1.2 MB sent, 32.0 times fewer bytes than dense; encode 0.50 s, wire 1.25 s, decode 0.25 s"
    )
    assert str(Stats(0, 0, 0, {})) == "0 steps, nothing sent"
