"""The meter against the network card: what was counted is what left."""

from __future__ import annotations

import json
import sys

import pytest

from gradwire import lab

WORKER = """
import json, sys
import torch, torch.distributed as dist
import gradwire
from gradwire.lab import interface_counters

torch.set_num_threads(1)
dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.zeros(2048, 2048))
bias = torch.nn.Parameter(torch.zeros(2048))
for method, options in json.loads(sys.argv[1]):
    sync = gradwire.Synchronizer([("weight", weight), ("bias", bias)], method, **options)
    weight.grad, bias.grad = torch.randn(2048, 2048), torch.randn(2048)
    sync.synchronize()
    dist.barrier()
    rounds = []
    for _ in range(3):  # a busy machine makes for more acknowledgements: the least is what the payload needs
        metered, sent = sync.stats().wire_bytes, interface_counters().tx_bytes
        sync.synchronize()
        dist.barrier()
        rounds.append((interface_counters().tx_bytes - sent, sync.stats().wire_bytes - metered))
    sent, metered = min(rounds)
    print(json.dumps([method, metered, sent]), flush=True)
    sync.close()
"""

METHODS = [
    ("dense", {}),
    ("bf16", {}),
    ("qsgd", {"bits": 8}),
    ("qsgd", {"bits": 8, "route": "gather"}),
    ("topk", {"ratio": 0.1}),
    ("randomk", {"ratio": 0.1}),
    ("globalqsgd", {}),
    ("gtopk", {"ratio": 0.1}),
    ("scalecom", {"ratio": 0.1}),
    ("oktopk", {"ratio": 0.1}),
]


@pytest.mark.usefixtures("begun_quickly")
@pytest.mark.skipif(not lab.availability().possible, reason=lab.availability().reason)
def test_metered_bytes_are_within_five_percent_of_the_interfaces() -> None:
    with lab.Lab(workers=3, rate="2.5gbit") as opened:
        result = opened.run([sys.executable, "-c", WORKER, json.dumps(METHODS)], timeout=120)
    for output in result.outputs:
        rows = [json.loads(line) for line in output.splitlines()]
        assert [row[0] for row in rows] == [method for method, _ in METHODS]
        for method, metered, sent in rows:
            assert metered > 1_000_000, method
            # TCP and IP headers, acknowledgements and the barrier's few packets come on top.
            assert metered <= sent <= 1.05 * metered, (method, metered, sent)
