"""Checksums on payloads and digests of averages: what is changed on its way is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from flipping import Flipping
from gradwire.engine.guards import Guard
from gradwire.engine.unit import Unit
from gradwire.kernels import cpu, reference
from gradwire.wire import (
    AllGather,
    AllReduceMean,
    AllToAll,
    Broadcast,
    CheckedTransport,
    Exchange,
    Meter,
    ProcessGroupTransport,
    Request,
)
from gradwire.wire.checked import SEAL_BYTES, checksum_of, checksums
from gradwire.wire.fusion import issue
from pool import Pool, ranks


def requests_of_all_kinds(rank: int, workers: int, size: int) -> list[Request]:
    partner = rank ^ 1 if rank ^ 1 < workers else rank
    bits = torch.arange(size).to(torch.uint8) + rank
    return [
        AllGather(bits.clone()),
        AllToAll(bits.expand(workers, -1).contiguous()),
        Exchange(bits.clone(), partner),
        Broadcast(torch.arange(size, dtype=torch.float32) + rank, 1),
        AllReduceMean(torch.full((size,), float(rank))),
    ]


def checked_equals_plain() -> list[tuple[int, int]]:
    """Returns what is counted with and without checksums, for payloads of several sizes."""
    group = dist.group.WORLD
    assert group is not None
    counted = []
    plain = ProcessGroupTransport(group)
    meters = Meter(), Meter()
    checked = CheckedTransport(plain, meters[1])
    for size in (1, 7, 8, 1001):
        answers = []
        for transport, meter in ((plain, meters[0]), (checked, meters[1])):
            started = requests_of_all_kinds(plain.rank, plain.world_size, size)
            answers.append([answer.clone() for answer in issue(started, transport, meter)()])
        assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True)), size
        counted.append((meters[0].wire_bytes, meters[1].wire_bytes))
    return counted


def test_checked_payloads_arrive_as_they_are_and_are_metered(pool: Pool) -> None:
    counted = pool.run(3, checked_equals_plain)
    plain, checked = (sum(rank[-1][which] for rank in counted) for which in (0, 1))
    # of four sizes, all-gather and all-to-all to two others each, one pair, and a broadcast to two
    assert checked - plain == 4 * SEAL_BYTES * (3 * 2 + 3 * 2 + 2 + 2)


@ranks(2)
def test_a_flipped_bit_is_found_with_its_sender() -> None:
    group = dist.group.WORLD
    assert group is not None
    flipping = Flipping(group)
    checked = CheckedTransport(flipping, Meter())
    names = ["all-gather", "all-to-all", "exchange", "broadcast"]
    for index, name in enumerate(names):
        flipping.sender = -1
        request = requests_of_all_kinds(flipping.rank, flipping.world_size, 100)[index]
        issue([request], checked, Meter())()
        for flipping.payloads, flipping.seals in ((True, False), (False, True), (True, True)):
            flipping.sender = 0 if name == "exchange" else 1
            request = requests_of_all_kinds(flipping.rank, flipping.world_size, 100)[index]
            flight = issue([request], checked, Meter())
            if name == "exchange" and flipping.rank != 1:
                flipping.sender = -1
                flight()
                continue
            with pytest.raises(gradwire.PayloadError, match=f"{name} of .* from rank {flipping.sender} to rank"):
                flight()


def test_checksums_see_every_bit_and_every_order() -> None:
    bits = torch.randint(256, (96,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    seen = {int(checksum_of(bits)), int(checksum_of(torch.cat([bits[8:], bits[:8]])))}
    for position in range(96):
        for bit in range(8):
            other = bits.clone()
            other[position] ^= 1 << bit
            seen.add(int(checksum_of(other)))
    assert len(seen) == 2 + 96 * 8


def test_any_two_flipped_bits_are_found() -> None:
    bits = torch.randint(256, (1, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    pairs = torch.combinations(torch.arange(256))
    rows = bits.repeat(len(pairs), 1)
    for column in pairs.T:
        spot = column.view(-1, 1) // 8
        rows.scatter_(1, spot, rows.gather(1, spot) ^ (1 << column % 8).to(torch.uint8).view(-1, 1))
    assert not bool((checksums(rows) == checksums(bits)).any())


@pytest.mark.parametrize(("rows", "width"), [(1, 0), (1, 1), (3, 5), (2, 1000), (4, 4097)])
def test_checksums_are_the_reference(rows: int, width: int) -> None:
    extremes = torch.iinfo(torch.int32)
    generator = torch.Generator().manual_seed(width)
    words = torch.randint(extremes.min, extremes.max, (rows, width), dtype=torch.int32, generator=generator)
    ours, theirs = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.int64)
    cpu.checksums(words, ours)
    reference.checksums(words, theirs)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, checksums(words.view(torch.uint8)))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 48), nn.ReLU(), nn.Linear(48, 40))


def trained(way: str, method: str, options: dict[str, Any], spoil: Guard | None = None) -> list[Tensor]:
    net = network()
    sync: gradwire.Synchronizer | None = None
    model: nn.Module = net
    if way == "ddp":
        wrapped = DistributedDataParallel(net, bucket_cap_mb=0.005)
        handle, model = gradwire.compress(wrapped, method, **options), wrapped
    else:
        handle = sync = gradwire.Synchronizer(net.named_parameters(), method, **options)
    if spoil is not None:
        handle.engine.guards.append(spoil)
    try:
        for step in range(6):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            net.zero_grad()
            model(torch.randn(4, 40, generator=generator)).square().mean().backward()
            if sync is not None:
                sync.synchronize()
    finally:
        handle.close()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


class Spoiled(Guard):
    """One rank's memory fails: a bit of one parameter's average is another there, in step 2."""

    def __init__(self, rank: int) -> None:
        self._here = dist.get_rank() == rank
        self._step = 0

    def after_decode(self, unit: Unit, average: Tensor) -> None:
        for slot in unit.slots:
            if self._here and self._step == 2 and slot.name.endswith("2.weight"):
                average[slot.offset + 5 : slot.offset + 6].view(torch.int32).bitwise_xor_(1)

    def after_step(self) -> None:
        self._step += 1


@pytest.mark.parametrize("way", ["ddp", "synchronizer"])
@ranks(3)
def test_every_rank_raises_when_averages_differ(way: str) -> None:
    for method, options in (("powersgd", {"rank": 2}), ("topk", {"ratio": 0.1})):
        verified = {**options, "verify_every": 2}
        pairs = zip(trained(way, method, verified), trained(way, method, options), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        with pytest.raises(gradwire.DivergenceError, match=r"after step 2 .*2\.weight.*ranks 0, 2 against rank 1"):
            trained(way, method, verified, Spoiled(1))


@ranks(1)
def test_an_interval_out_of_range_is_refused() -> None:
    for every in (True, -3, 1.5):
        with pytest.raises(gradwire.ConfigurationError, match=r"verify_every=.*or 0 for never"):
            gradwire.Synchronizer(network().named_parameters(), "dense", verify_every=every)  # type: ignore[arg-type]
    with pytest.raises(
        gradwire.ConfigurationError, match=r"'dense' has no option 'verify'; did you mean 'verify_every'"
    ):
        gradwire.Synchronizer(network().named_parameters(), "dense", verify=True)
