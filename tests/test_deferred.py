"""Flags that are read at once on the CPU, and a step later where a device has them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire import deferred
from gradwire.deferred import Later, chosen, copy_where, expect, known, learn, placed
from gradwire.errors import PayloadError
from gradwire.wire import AllGather, Meter, Scheduler, Synchronization, local_transports

META = torch.device("meta")


def wrong() -> Exception:
    return PayloadError("not what any encoder writes")


@pytest.mark.parametrize("holds", [True, False])
def test_what_the_host_knows_is_taken_as_it_is(holds: bool) -> None:
    yes, no = torch.ones(3), torch.zeros(3)
    flag = deferred.flag(holds)
    assert known(flag) == holds
    assert torch.equal(chosen(flag, yes, no), yes if holds else no)
    assert (chosen(flag, yes, no) is yes) == holds
    target = no.clone()
    copy_where(flag, yes, target)
    assert torch.equal(target, yes if holds else no)


def test_nothing_is_known_of_a_device() -> None:
    flag, values = torch.ones((), dtype=torch.bool, device=META), torch.ones(3, device=META)
    assert not known(flag)
    assert chosen(flag, values, values).is_meta
    copy_where(flag, values, values)


def test_the_cpu_is_told_at_once() -> None:
    heard: list[float] = []
    with Later().collecting():
        learn(torch.tensor(2.0), lambda value: heard.append(float(value)))
        assert heard == [2.0]
        expect(torch.tensor(True), wrong)
        with pytest.raises(PayloadError):
            expect(torch.tensor(False), wrong)


def test_a_device_is_heard_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(values: Tensor) -> Callable[[], Tensor]:
        return lambda: torch.zeros(values.shape, dtype=values.dtype)

    monkeypatch.setattr(deferred, "sent_to_host", sent)
    heard: list[float] = []
    step, other = Later(), Later()
    with step.collecting():
        learn(torch.empty((), device=META), lambda value: heard.append(float(value)))
        with other.collecting():
            expect(torch.empty((), dtype=torch.bool, device=META), wrong)
        learn(torch.empty((), device=META), lambda value: heard.append(float(value)))
    assert heard == []
    step.settle()
    assert heard == [0.0, 0.0]
    step.settle()
    assert heard == [0.0, 0.0]
    with pytest.raises(PayloadError):
        other.settle()


def test_what_a_device_tells_of_a_step_comes_in_a_copy_for_each_type(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[torch.dtype] = []

    def sent(values: Tensor) -> Callable[[], Tensor]:
        copies.append(values.dtype)
        return values.clone

    monkeypatch.setattr(deferred, "sent_to_host", sent)
    step, heard = Later(), list[Tensor]()
    told = [torch.tensor(True), torch.arange(6).view(2, 3), torch.tensor(False), torch.tensor(7), torch.ones(0)]
    for values in told:
        step.add(values, heard.append)
    step.send()
    assert copies == [torch.bool, torch.int64, torch.float32]
    step.settle()
    assert len(copies) == 3
    for values, found in zip(told, heard, strict=True):
        assert torch.equal(values, found)


def test_the_scheduler_hears_of_a_step_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "sent_to_host", lambda values: lambda: torch.zeros(values.shape, dtype=values.dtype))
    heard: list[float] = []

    def telling(number: float) -> Synchronization:
        learn(torch.empty((), device=META), lambda _: heard.append(number))
        yield AllGather(torch.zeros(4, dtype=torch.uint8))
        learn(torch.empty((), device=META), lambda _: heard.append(number + 0.5))

    def spoilt() -> Synchronization:
        yield AllGather(torch.zeros(4, dtype=torch.uint8))
        expect(torch.empty((), dtype=torch.bool, device=META), wrong)

    scheduler = Scheduler(*local_transports(1), Meter(), fuse_bytes=1)
    scheduler.submit([telling(1)], lambda: None)
    scheduler.submit([telling(2)], lambda: None, last=True)
    assert heard == []
    scheduler.submit([telling(3)], lambda: None)
    scheduler.settle()  # in the middle of a step: nothing
    assert heard == [1, 2, 1.5, 2.5]
    scheduler.submit([spoilt()], lambda: None, last=True)
    assert heard == [1, 2, 1.5, 2.5]
    with pytest.raises(PayloadError):
        scheduler.submit([telling(4)], lambda: None, last=True)
    assert heard == [1, 2, 1.5, 2.5, 3, 3.5]


def test_numbers_on_the_cpu_are_not_copied() -> None:
    numbers = np.arange(3)
    assert placed(numbers, torch.device("cpu")).data_ptr() == numbers.ctypes.data
    assert placed(numbers, META).is_meta
