"""Waiting for what may never end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest

from gradwire.wire.patience import Patience

LIMIT = timedelta(seconds=60)


class Never:
    """A collective of gloo, or a transfer, that waits until it is let go."""

    def __init__(self) -> None:
        self.ends = threading.Event()
        self.failure = ""

    def is_completed(self) -> bool:
        return self.ends.is_set()

    def wait(self, timeout: timedelta = LIMIT) -> bool:
        if not self.ends.wait(timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self.failure:
            raise RuntimeError(self.failure)
        return True


class Held:
    """A process group, as far as holding it goes."""


def gone(ranks: Sequence[int]) -> None:
    if 1 in ranks:
        raise RuntimeError("rank 1 is gone")


def all_there(ranks: Sequence[int]) -> None:
    pass


def begun(patience: Patience, work: Never, transfer: bool) -> Callable[[], None]:
    return patience.for_transfers([work], [1]) if transfer else patience.for_collective(work, [1, 2])


@pytest.mark.parametrize("transfer", [False, True])
def test_who_waits_finds_that_a_rank_is_gone(transfer: bool) -> None:
    work = Never()
    patience = Patience(gone, LIMIT)
    wait = begun(patience, work, transfer)
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        wait()
    work.ends.set()
    patience.close(None)


def test_a_rank_that_has_had_its_part_may_go() -> None:
    with_one, with_two = Never(), Never()
    patience = Patience(gone, LIMIT)
    wait = patience.for_transfers([with_one, with_two], [1, 2])
    with_one.ends.set()
    threading.Timer(2.5, with_two.ends.set).start()
    wait()
    assert with_two.is_completed()
    collective = Never()
    wait = patience.for_collective(collective, [1, 2])
    threading.Timer(2.5, collective.ends.set).start()  # in its time of grace
    wait()
    assert collective.is_completed()
    patience.close(None)


def test_who_waits_for_a_transfer_hears_of_a_collective_that_has_failed() -> None:
    """Of its connection gloo may say nothing then."""
    transfer, collective, later = Never(), Never(), Never()
    patience = Patience(all_there, LIMIT)
    wait = patience.for_transfers([transfer], [1])
    patience.for_collective(collective, [1, 2])
    collective.failure = "Connection closed by peer"
    collective.ends.set()
    patience.for_collective(later, [1, 2])
    with pytest.raises(RuntimeError, match="closed by peer"):
        wait()
    transfer.ends.set()
    later.ends.set()
    patience.close(None)


@pytest.mark.parametrize("transfer", [False, True])
def test_another_thread_ends_the_waiting(transfer: bool) -> None:
    work = Never()
    patience = Patience(all_there, None)
    wait = begun(patience, work, transfer)
    breaking = threading.Timer(0.3, patience.break_off)
    breaking.start()
    with pytest.raises(RuntimeError, match="broken off"):
        wait()
    work.ends.set()
    patience.close(None)


@pytest.mark.parametrize("transfer", [False, True])
def test_it_waits_for_longer_than_a_slice_and_no_longer_than_the_limit(transfer: bool) -> None:
    work = Never()
    calls: list[float] = []
    patience = Patience(lambda ranks: calls.append(time.monotonic()), LIMIT)
    threading.Timer(4.0, work.ends.set).start()
    start = time.monotonic()
    begun(patience, work, transfer)()
    assert work.ends.is_set()
    assert len(calls) >= 1  # after 1 s, and after 2
    assert all(call - start >= 1 for call in calls)
    short, stuck = Patience(all_there, timedelta(milliseconds=500)), Never()
    with pytest.raises(RuntimeError, match=r"in time|timed out"):
        begun(short, stuck, transfer)()
    stuck.ends.set()
    short.close(None)
    patience.close(None)


@pytest.mark.parametrize("transfer", [False, True])
def test_what_fails_by_itself_says_so(transfer: bool) -> None:
    work = Never()
    work.failure = "Connection reset by peer"
    patience = Patience(all_there, LIMIT)
    wait = begun(patience, work, transfer)
    work.ends.set()
    with pytest.raises(RuntimeError, match="reset by peer"):
        wait()
    patience.close(None)


def test_a_stuck_collective_that_nobody_waited_for_holds_the_group() -> None:
    ended, stuck = Never(), Never()
    patience = Patience(all_there, LIMIT)
    patience.for_collective(ended, [1])
    patience.for_collective(stuck, [1])
    ended.ends.set()
    held = Held()
    alive = weakref.ref(held)
    patience.close(held)
    del held
    gc.collect()
    assert alive() is not None
    stuck.ends.set()
    for thread in threading.enumerate():
        if thread.name == "gradwire left":
            thread.join(10)
    gc.collect()
    assert alive() is None


def test_closing_begins_no_thread_for_what_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the interpreter ends none begins, and who starts one waits for ever."""
    patience, failed = Patience(all_there, LIMIT), Never()
    patience.for_collective(failed, [1])
    failed.failure = "Connection closed by peer"
    failed.ends.set()
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail(f"{thread.name} was started"))
    patience.close(None)


def test_collectives_that_have_ended_are_let_go_of() -> None:
    patience = Patience(all_there, LIMIT)
    work = Never()
    work.ends.set()
    alive = weakref.ref(work)
    patience.for_collective(work, [1])()
    del work
    gc.collect()
    assert alive() is None
