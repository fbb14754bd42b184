"""The order of everything on the wire, with a transport that only takes notes."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

import pytest
import torch
from torch import Tensor

from gradwire.engine.configuration import Configuration
from gradwire.engine.engine import Engine
from gradwire.layout import flat_slots
from gradwire.wire import (
    AllGather,
    AllReduceMean,
    AllToAll,
    Meter,
    Pending,
    Request,
    Scheduler,
    Synchronization,
    late,
    lockstep,
)
from gradwire.wire.fusion import issue


class Notes:
    """A world of several workers that all send the same; notes what is issued and waited for."""

    rank = 0
    world_size = 4

    def __init__(self) -> None:
        self.events: list[str] = []

    def _issued(self, kind: str, tensor: Tensor, result: Tensor) -> Pending:
        label = f"{kind}[{tensor.nbytes}]"
        self.events.append(f"issue {label}")

        def wait() -> Tensor:
            self.events.append(f"wait {label}")
            return result

        return wait

    def all_reduce(self, buffer: Tensor, operation: object) -> Pending:
        return self._issued("reduce", buffer, buffer.mul_(self.world_size))

    def all_gather(self, payload: Tensor, straight: bool = False) -> Pending:
        return self._issued("gather", payload, payload.expand(self.world_size, -1))

    def all_to_all(self, payloads: Tensor) -> Pending:
        return self._issued("exchange", payloads, payloads[:1].expand_as(payloads))


def rounds(sizes: list[int]) -> Synchronization:
    for size in sizes:
        yield AllGather(torch.zeros(size, dtype=torch.uint8))


def averages(numel: int, dtype: torch.dtype = torch.float32) -> Synchronization:
    mean = yield AllReduceMean(torch.full((numel,), 3.0, dtype=dtype))
    assert torch.equal(mean, torch.full((numel,), 3.0, dtype=dtype))


def issued_and_done(buckets: list[list[Synchronization]], fuse_bytes: int) -> tuple[list[str], list[int]]:
    """What a step of these buckets issues, in that order, and the order in which they finish."""
    notes = Notes()
    done: list[int] = []
    scheduler = Scheduler(notes, Meter(), fuse_bytes)
    for number, bucket in enumerate(buckets):
        scheduler.submit(bucket, partial(done.append, number), last=number == len(buckets) - 1)
    return [event.removeprefix("issue ") for event in notes.events if event.startswith("issue")], done


def test_two_round_groups_form_the_pipeline() -> None:
    issued, done = issued_and_done([[rounds([10 + bucket, 20 + bucket])] for bucket in range(5)], fuse_bytes=1)
    assert issued == [f"gather[{size}]" for size in (10, 11, 12, 20, 13, 21, 14, 22, 23, 24)]
    assert done == [0, 1, 2, 3, 4]


def test_two_rounds_are_on_their_way_while_the_next_group_is_encoded() -> None:
    notes = Notes()

    def encoded(size: int) -> Synchronization:
        notes.events.append(f"encode {size}")
        yield from rounds([size])

    scheduler = Scheduler(notes, Meter(), fuse_bytes=1)
    for size in range(1, 5):
        scheduler.submit([encoded(size)], lambda: None, last=size == 4)
    events = [event.replace("gather", "").strip() for event in notes.events]
    assert events[:7] == ["encode 1", "issue [1]", "encode 2", "issue [2]", "encode 3", "issue [3]", "wait [1]"]
    assert events[7:] == ["encode 4", "issue [4]", "wait [2]", "wait [3]", "wait [4]"]


def test_small_payloads_share_a_collective() -> None:
    issued, done = issued_and_done([[rounds([40])] for _ in range(5)], fuse_bytes=100)
    assert issued == ["gather[120]", "gather[80]"]
    assert done == [0, 1, 2, 3, 4]


def test_late_averages_are_gathered_to_the_end_of_the_step() -> None:
    buckets = [[rounds([100 + bucket, 200 + bucket]), late(averages(1 + bucket))] for bucket in range(3)]
    issued, done = issued_and_done(buckets, fuse_bytes=100)
    rings = [f"gather[{size}]" for size in (100, 101, 102, 200, 201, 202)]
    assert issued == [*rings[:2], "reduce[24]", *rings[2:]]
    assert done == [0, 1, 2]


def test_what_waits_for_late_averages_is_done_before_the_last_group_lands() -> None:
    notes = Notes()
    scheduler = Scheduler(notes, Meter(), fuse_bytes=10)
    for number in range(3):
        done = partial(notes.events.append, f"done {number}")
        parts = [rounds([10 + number])] if number == 2 else [rounds([10 + number]), late(averages(1))]
        scheduler.submit(parts, done, last=number == 2)
    assert notes.events[4:] == [
        *("wait gather[10]", "wait gather[11]", "wait reduce[8]"),
        *("done 0", "done 1", "wait gather[12]", "done 2"),
    ]


def test_late_averages_share_the_collective_of_others() -> None:
    buckets = [[late(averages(1)), rounds([10])], [averages(3), late(averages(2))], [averages(4)]]
    issued, done = issued_and_done(buckets, fuse_bytes=10)
    assert issued == ["gather[10]", "reduce[24]", "reduce[16]"]
    assert done == [0, 1, 2]


def test_late_averages_of_another_dtype_are_not_waited_for() -> None:
    buckets = [[late(averages(1)), averages(4, torch.bfloat16)], [late(averages(2)), averages(3, torch.bfloat16)]]
    issued, done = issued_and_done(buckets, fuse_bytes=8)
    assert issued == ["reduce[8]", "reduce[12]", "reduce[6]"]
    assert done == [0, 1]


def test_late_averages_do_not_wait_once_they_are_many() -> None:
    buckets = [[late(averages(3)), rounds([5])] for _ in range(4)]
    issued, done = issued_and_done(buckets, fuse_bytes=20)
    assert issued == ["reduce[24]", "reduce[24]", "gather[20]"]
    assert done == [0, 1, 2, 3]


def test_straight_gathers_are_told_from_rings() -> None:
    class Told(Notes):
        def all_gather(self, payload: Tensor, straight: bool = False) -> Pending:
            self.events.append(f"straight {straight}")
            return super().all_gather(payload, straight)

    told = Told()
    asked = [AllGather(torch.zeros(size, dtype=torch.uint8), straight=size > 5) for size in (4, 8, 5, 6)]
    assert [answer.shape[1] for answer in issue(asked, told, Meter())()] == [4, 8, 5, 6]
    assert told.events[:4] == ["straight False", "issue gather[9]", "straight True", "issue gather[14]"]


def test_what_is_not_compressed_is_late_and_owners_send_straight() -> None:
    engine = Engine(Configuration.make("qsgd", {}, route="sharded"), 0, 2, torch.device("cpu"))
    unit = engine.unit(flat_slots([("weight", (64, 64)), ("bias", (64,))]))
    compressed, rest = engine.synchronizations(unit, torch.randn(unit.numel))
    asked, average = next(compressed), next(rest)
    assert isinstance(average, AllReduceMean)
    assert average.late
    assert isinstance(asked, AllToAll)
    back = compressed.send(asked.payload)
    assert isinstance(back, AllGather)
    assert back.straight


def test_the_averages_of_a_dense_method_are_not_late() -> None:
    engine = Engine(Configuration.make("dense", {}), 0, 2, torch.device("cpu"))
    unit = engine.unit(flat_slots([("weight", (64, 64)), ("bias", (64,))]))
    asked = [next(each) for each in engine.synchronizations(unit, torch.randn(unit.numel))]
    assert asked
    assert not any(isinstance(each, AllReduceMean) and each.late for each in asked)


def test_a_round_is_one_collective_for_each_kind_and_dtype() -> None:
    notes, meter = Notes(), Meter()
    generator = torch.Generator().manual_seed(1)
    requests: list[Request] = [
        AllReduceMean(torch.randn(3, 4, generator=generator)),
        AllGather(torch.arange(8, dtype=torch.uint8)),
        AllReduceMean(torch.randn(5, generator=generator)),
        AllReduceMean(torch.randn(6, generator=generator).half()),
        AllToAll(torch.arange(16, dtype=torch.uint8).view(4, 4)),
        AllGather(torch.arange(4, dtype=torch.uint8)),
    ]
    expected = [request.payload.clone() for request in requests]
    answers = issue(requests, notes, meter)()
    assert len([event for event in notes.events if event.startswith("issue")]) == 4
    for index in (0, 2, 3):
        torch.testing.assert_close(answers[index], expected[index], rtol=1e-3, atol=1e-3)
        assert answers[index].shape == expected[index].shape
    assert torch.equal(answers[1], expected[1].expand(4, -1))
    assert torch.equal(answers[5], expected[5].expand(4, -1))
    assert torch.equal(answers[4], expected[4][:1].expand(4, -1))
    assert meter.wire_bytes == 2 * 3 * 68 // 4 + 2 * 3 * 12 // 4 + 3 * 12 + 3 * 4


def test_lockstep_joins_rounds_of_unequal_length() -> None:
    def asks(number: int) -> Synchronization:
        for value in range(number):
            answer = yield AllReduceMean(torch.tensor(float(value)))
            assert answer == value + 100

    steps = lockstep([asks(1), asks(3), asks(0), asks(2)])
    requests, lengths = next(steps), []
    try:
        while True:
            lengths.append(len(requests))
            requests = steps.send([request.payload + 100 for request in requests])
    except StopIteration:
        pass
    assert lengths == [3, 2, 1]


def test_a_synchronization_may_ask_for_several_things_at_once() -> None:
    heard: list[list[Tensor]] = []

    def asks() -> Generator[list[Request], list[Tensor], None]:
        heard.append((yield [AllReduceMean(torch.ones(2)), AllReduceMean(torch.zeros(3))]))

    steps = lockstep([asks(), rounds([7])])
    requests = next(steps)
    assert len(requests) == 3
    with pytest.raises(StopIteration):
        steps.send([request.payload for request in requests])
    assert [len(tensor) for tensor in heard[0]] == [2, 3]
