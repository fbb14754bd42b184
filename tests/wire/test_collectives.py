"""Every request on a real gloo group: what comes back, what is fused, and what is counted."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import torch.distributed as dist

from gradwire import lab
from gradwire.wire import (
    AllGather,
    AllReduceMax,
    AllReduceMean,
    AllReduceSum,
    AllToAll,
    Broadcast,
    Exchange,
    Meter,
    ProcessGroupTransport,
    Request,
)
from gradwire.wire.fusion import issue
from pool import Pool, ranks


def issued(requests: list[Request]) -> tuple[list[torch.Tensor], int]:
    """One round on the default group, and the bytes this rank was told it sends."""
    group = dist.group.WORLD
    assert group is not None
    meter = Meter()
    answers = issue(requests, ProcessGroupTransport(group), meter)()
    return answers, meter.wire_bytes


def one_round_of_everything(workers: int) -> int:
    """Two of each kind at once, so that all of them are fused; returns the metered bytes."""
    rank = dist.get_rank()
    partner = rank ^ 1 if rank ^ 1 < workers else rank
    sources = [0, workers - 1]
    requests: list[Request] = []
    for size in (5, 8):
        requests += [
            AllReduceSum(torch.full((size,), rank + 1, dtype=torch.uint8)),
            AllReduceSum(torch.full((2, size), -(rank + 1), dtype=torch.int8)),
            AllReduceMax(torch.arange(size, dtype=torch.float32) * (-1) ** rank),
            AllReduceMean(torch.full((size,), float(rank))),
            *(Broadcast(torch.full((size,), rank, dtype=torch.uint8), source) for source in sources),
            Exchange(torch.full((4 * size,), 10 * size + rank, dtype=torch.uint8), partner),
            AllGather(torch.full((4 * size,), rank, dtype=torch.uint8)),
            AllGather(torch.full((4 * size,), rank, dtype=torch.uint8), straight=True),
            AllToAll(torch.full((workers, 4 * size), rank, dtype=torch.uint8)),
        ]
    answers, metered = issued(requests)
    for size, got in zip((5, 8), (answers[:10], answers[10:]), strict=True):
        total = workers * (workers + 1) // 2
        assert torch.equal(got[0], torch.full((size,), total, dtype=torch.uint8))
        assert torch.equal(got[1], torch.full((2, size), -total, dtype=torch.int8))
        assert torch.equal(got[2], torch.arange(size, dtype=torch.float32))
        torch.testing.assert_close(got[3], torch.full((size,), (workers - 1) / 2))
        assert torch.equal(got[4], torch.full((size,), sources[0], dtype=torch.uint8))
        assert torch.equal(got[5], torch.full((size,), sources[1], dtype=torch.uint8))
        assert torch.equal(got[6], torch.full((4 * size,), 10 * size + partner, dtype=torch.uint8))
        every = torch.arange(workers, dtype=torch.uint8)[:, None].expand(-1, 4 * size)
        assert torch.equal(got[7], every)
        assert torch.equal(got[8], every)
        assert torch.equal(got[9], every)
    return metered


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_all_requests_of_a_round_are_answered(pool: Pool, workers: int) -> None:
    metered = pool.run(workers, one_round_of_everything, workers)
    others = workers - 1
    paired = workers // 2 * 2
    reduced = sum(2 * others * nbytes // workers for nbytes in (13, 26, 52, 52)) * workers
    broadcast = 2 * 13 * others if workers > 1 else 0
    assert sum(metered) == reduced + broadcast + 52 * paired + 3 * 52 * others * workers


@ranks(2)
def test_bytes_may_lie_in_any_order() -> None:
    """A round of one request, whose payload travels as it lies where it can."""
    rank = dist.get_rank()
    rows = torch.arange(12, dtype=torch.uint8).view(6, 2).T + 100 * rank
    ((came,), _), ((gathered,), _) = issued([AllToAll(rows)]), issued([AllGather(rows.flatten()[::2])])
    assert torch.equal(came, torch.stack([torch.arange(0, 12, 2) + rank + 100 * source for source in range(2)]))
    for source, row in enumerate(gathered):
        assert row.tolist() == [each + 100 * source for each in (0, 4, 8, 1, 5, 9)]


@ranks(2)
def test_words_are_read_beside_payloads_of_any_size() -> None:
    """Three bytes of one who asks for them in the same round lie before four of another."""
    rank = dist.get_rank()
    three, word = torch.zeros(3, dtype=torch.uint8), torch.tensor([float(rank)]).view(torch.uint8)
    for kind, seen in (
        (AllGather, [[0.0], [1.0]]),
        (lambda payload: AllToAll(payload.repeat(2, 1)), [[0.0], [1.0]]),
        (lambda payload: Exchange(payload, 1 - rank), [1.0 - rank]),
        (lambda payload: Broadcast(payload.clone(), 1), [1.0]),
    ):
        (_, answer), _ = issued([kind(three), kind(word)])
        assert answer.view(torch.float32).tolist() == seen


@ranks(3)
def test_infinity_survives_a_maximum() -> None:
    bad = torch.tensor([1.0, torch.inf if dist.get_rank() == 1 else 2.0])
    (answer,), _ = issued([AllReduceMax(bad)])
    assert answer.tolist() == [1.0, torch.inf]


def three_rounds_of_pairs(workers: int) -> None:
    """Ranks change partners from round to round; each sees what its partner of that round sent."""
    rank = dist.get_rank()
    for step in range(3):
        partner = rank ^ (1 << step)
        partner = partner if partner < workers else rank
        (answer,), _ = issued([Exchange(torch.full((1000,), 16 * step + rank, dtype=torch.uint8), partner)])
        assert torch.equal(answer, torch.full((1000,), 16 * step + partner, dtype=torch.uint8))


@pytest.mark.parametrize("workers", [3, 5])
def test_partners_change_between_rounds(pool: Pool, workers: int) -> None:
    pool.run(workers, three_rounds_of_pairs, workers)


WORKER = """
import json
import torch, torch.distributed as dist
from gradwire.lab import interface_counters
from gradwire.wire import AllReduceMax, AllReduceSum, Broadcast, Exchange, Meter, ProcessGroupTransport
from gradwire.wire.fusion import issue

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
transport = ProcessGroupTransport(dist.group.WORLD)
nbytes = 4_000_000
partner = rank ^ 1 if rank ^ 1 < world else rank
rounds = {
    "broadcast from 0": lambda: Broadcast(torch.zeros(nbytes, dtype=torch.uint8), 0),
    "broadcast from 2": lambda: Broadcast(torch.zeros(nbytes, dtype=torch.uint8), 2),
    "exchange": lambda: Exchange(torch.zeros(nbytes, dtype=torch.uint8), partner),
    "sum": lambda: AllReduceSum(torch.zeros(nbytes, dtype=torch.uint8)),
    "max": lambda: AllReduceMax(torch.zeros(nbytes // 4)),
}
for name, make in rounds.items():
    issue([make()], transport, Meter())()
    dist.barrier()
    meter, sent = Meter(), interface_counters().tx_bytes
    for _ in range(2):
        issue([make()], transport, meter)()
    dist.barrier()
    print(json.dumps([name, meter.wire_bytes, interface_counters().tx_bytes - sent]), flush=True)
transport.close()
"""


@pytest.mark.usefixtures("begun_quickly")
@pytest.mark.skipif(not lab.availability().possible, reason=lab.availability().reason)
@pytest.mark.parametrize("workers", [3, 5])
def test_each_rank_sends_what_is_counted(workers: int) -> None:
    with lab.Lab(workers=workers, rate="2.5gbit") as opened:
        result = opened.run([sys.executable, "-c", WORKER], timeout=120)
    for output in result.outputs:
        rows = [json.loads(line) for line in output.splitlines()]
        assert len(rows) == 5
        for name, metered, sent in rows:
            # Headers come on top, and acknowledgements of what was received where little or nothing is sent.
            assert metered <= sent <= 1.05 * metered + 400_000, (name, metered, sent)
