"""What the wire does where a device computes, as far as it can be seen without one."""

from __future__ import annotations

import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import ConfigurationError, WireError
from gradwire.attach.given import check_backend
from gradwire.engine.configuration import Configuration
from gradwire.engine.engine import Engine
from gradwire.wire import Meter, Wire
from gradwire.wire.sibling import _options_of, backends_of, carrier_of, sibling_of
from gradwire.wire.staged import StagedTransport, transport_for
from gradwire.wire.transport import ProcessGroupTransport, failure_of, timeout_of
from gradwire.wire.watch import Watch
from gradwire.wire.wire import LOOK_SECONDS
from pool import ranks

CUDA = torch.device("cuda", 0)


class Event:
    """A moment on a stream that the device comes to when it is told to."""

    def __init__(self, moment: float) -> None:
        self.moment = moment
        self.reached = False

    def query(self) -> bool:
        return self.reached

    def elapsed_time(self, later: Event) -> float:
        assert self.reached
        assert later.reached
        return later.moment - self.moment


def test_a_devices_seconds_are_counted_when_it_is_through() -> None:
    events: list[Event] = []

    def mark() -> Event:
        events.append(Event(1000.0 * len(events) ** 2))
        return events[-1]

    meter = Meter(mark=mark)
    with meter.stage("encode"):
        pass
    meter.settle()
    assert meter.seconds["encode"] == 0
    for event in events:
        event.reached = True
    meter.edge = None  # others are at work on the device before the next stage
    with pytest.raises(RuntimeError, match="on purpose"), meter.stage("wire"):
        raise RuntimeError("on purpose")
    with meter.stage("decode"):  # begins where the last stage ended
        pass
    assert len(events) == 5
    meter.settle()
    assert meter.seconds == {"encode": 1.0, "wire": 0.0, "decode": 0.0}
    events[2].reached = events[3].reached = True
    with meter.copy().stage("decode"):
        pass
    meter.settle()
    assert meter.seconds == {"encode": 1.0, "wire": 5.0, "decode": 0.0}
    events[4].reached = True
    meter.settle()
    assert meter.seconds == {"encode": 1.0, "wire": 5.0, "decode": 7.0}


class Work:
    """A collective that a device is at until it is told that it is through."""

    completed = False

    def is_completed(self) -> bool:
        return self.completed


def test_a_device_that_is_at_it_for_too_long_is_found_out() -> None:
    watch, now = Watch(timedelta(seconds=10)), time.monotonic()
    done, late = Work(), Work()
    watch.add("all-gather of 8 bytes with 3 others", [done], now - 30)
    watch.add("all-reduce of 4 bytes with 3 others", [done, late], now - 20)
    done.completed = True
    with pytest.raises(WireError, match=r"all-reduce of 4 bytes .*timeout of 10 s: a worker hangs") as raised:
        watch.look()
    assert raised.value.seconds > 10
    late.completed = True
    watch.look()
    watch.add("all-gather of 8 bytes with 3 others", [Work()], now)
    watch.look()


def test_a_collective_that_is_through_is_let_go_of_before_the_next() -> None:
    watch, done = Watch(None), Work()
    held = weakref.ref(done)
    watch.add("all-gather of 8 bytes with 3 others", [done], time.monotonic())
    done.completed = True
    del done
    watch.add("all-gather of 9 bytes with 3 others", [Work()], time.monotonic())
    assert held() is None


def test_a_collective_that_failed_on_its_device_is_found_out() -> None:
    """To the host it is through."""
    said = [""]
    watch, failed = Watch(timedelta(seconds=10), lambda: said[0]), Work()
    watch.add("all-gather of 8 bytes with 3 others", [failed], time.monotonic())
    failed.completed = True
    said[0] = "cuda: comm error"
    with pytest.raises(WireError, match=r"all-gather of 8 bytes .*The backend said: cuda: comm error"):
        watch.look()


def test_what_a_backend_says_of_its_device() -> None:
    def group(told: object) -> Any:
        return mock.Mock(_device_types=[CUDA], _get_backend=lambda device: mock.Mock(get_error=told))

    assert failure_of(group(lambda: ErrorType.SUCCESS)) == ""
    assert failure_of(group(lambda: ErrorType.REMOTE_ERROR)) == "cuda: remote error"
    assert failure_of(group(mock.Mock(side_effect=RuntimeError("gloo does not tell")))) == ""


@ranks(2)
def test_a_group_of_ones_own_needs_nobody_elses_communicator() -> None:
    """As where init_process_group was given a device_id."""
    everybody = dist.group.WORLD
    assert everybody is not None
    assert failure_of(everybody) == ""
    everybody.bound_device_id = CUDA
    try:
        with mock.patch("torch.distributed.distributed_c10d._get_split_source", side_effect=AssertionError("split")):
            sibling = sibling_of(everybody, torch.device("cpu"))
        assert everybody.bound_device_id == CUDA
    finally:
        everybody.bound_device_id = None
    dist.barrier()  # all have come to it
    dist.destroy_process_group(sibling)


def test_without_a_limit_a_device_may_take_for_ever() -> None:
    watch = Watch(None)
    watch.add("all-reduce of 4 bytes with 3 others", [Work()], time.monotonic() - 1e6)
    watch.look()


class Stuck:
    """A line on which a device is at a collective that never ends."""

    rank = 0
    world_size = 2

    def __init__(self) -> None:
        self.aborted = self.closed = False

    def look(self) -> None:
        raise WireError("all-reduce of 4 bytes with 1 other", 99.0, 10.0, "the device is not through with it")

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True


def test_what_a_device_is_at_for_too_long_fails_the_wire() -> None:
    line = Stuck()
    with mock.patch("gradwire.wire.wire.LOOK_SECONDS", 0.001):
        wire = Wire(line, Meter(), 1, torch.device("cpu"))
        wire._watch()
    assert line.aborted
    with pytest.raises(WireError, match="all-reduce of 4 bytes"):
        wire.check()
    wire.close()
    assert line.closed
    assert LOOK_SECONDS < 10


@ranks(2)
def test_a_backend_that_cannot_carry_the_tensors_is_refused() -> None:
    group = dist.new_group(timeout=timedelta(seconds=77))
    assert isinstance(group, dist.ProcessGroup)
    check_backend(group, torch.device("cpu"))
    for carried, device, remedy in (("cuda", "cpu", "a backend for cpu"), ("mps", CUDA, "'cpu:gloo,cuda:nccl'")):
        with (
            mock.patch("gradwire.wire.sibling.backends_of", return_value={carried: "nccl"}),
            mock.patch("gradwire.attach.given.backends_of", return_value={carried: "nccl"}),
            pytest.raises(ConfigurationError, match=rf"on {device} .* carries {carried} tensors; .* with {remedy}"),
        ):
            check_backend(group, torch.device(device))
    assert backends_of(dist.new_group(backend="cpu:gloo")) == {"cpu": "gloo"}


@ranks(2)
def test_what_gloo_does_not_carry_from_a_device_goes_through_the_host() -> None:
    group = dist.group.WORLD
    assert group is not None
    warned = mock.Mock()
    with mock.patch("gradwire.attach.given._log.warning", warned):
        check_backend(group, CUDA)
    assert warned.call_count == (not group.rank())
    assert isinstance(transport_for(group, CUDA), StagedTransport)
    assert isinstance(transport_for(group, torch.device("cpu")), ProcessGroupTransport)
    with mock.patch("gradwire.wire.sibling.backends_of", return_value={"cpu": "gloo", "cuda": "nccl"}):
        assert isinstance(transport_for(group, CUDA), ProcessGroupTransport)
        assert carrier_of(group, CUDA) == CUDA
    sibling = sibling_of(group, CUDA)
    assert timeout_of(sibling) == timeout_of(group)  # gloo ends no process
    dist.barrier(sibling)
    dist.destroy_process_group(sibling)


@ranks(2)
def test_a_group_of_backends_by_device_has_a_sibling_that_ends_without_a_word() -> None:
    """As ``init_process_group()`` makes on the CPU; of such siblings torch warned where its compiler was loaded."""
    import torch._dynamo

    group = dist.new_group(backend="cpu:gloo")
    assert isinstance(group, dist.ProcessGroup)
    sibling = sibling_of(group, torch.device("cpu"))
    dist.barrier(sibling)
    with tempfile.TemporaryFile() as said:
        theirs = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            dist.destroy_process_group(sibling)
        finally:
            os.dup2(theirs, 2)
            os.close(theirs)
        said.seek(0)
        assert said.read() == b""


@ranks(2)
def test_what_pairs_swap_is_issued_at_once() -> None:
    """NCCL hangs where two ranks first receive from each other and then send."""
    group = dist.group.WORLD
    assert group is not None
    transport = ProcessGroupTransport(group)
    partner = 1 - transport.rank
    with mock.patch("torch.distributed.batch_isend_irecv", return_value=[]) as grouped:
        transport.exchange(torch.empty(4, dtype=torch.uint8, device="meta"), partner)
    answers = [
        transport.exchange(torch.full((4,), transport.rank, dtype=torch.uint8), partner)(),
        transport.all_to_all(torch.full((2, 4), transport.rank, dtype=torch.uint8))()[partner],
    ]
    assert all((answer == partner).all() for answer in answers)
    transfers = [[each.op for each in call.args[0]] for call in grouped.call_args_list]
    assert transfers == [[dist.irecv, dist.isend]]


@pytest.mark.parametrize("backends", ["cpu:gloo,cuda:gloo", "cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_nccl_goes_before_backward(backends: str) -> None:
    nccl = mock.Mock()
    with (
        mock.patch("torch.distributed.get_backend_config", return_value=backends),
        mock.patch("torch.distributed.ProcessGroupNCCL", nccl, create=True),
    ):
        options = _options_of(mock.Mock(), timedelta(seconds=7))
    if "nccl" in backends:
        nccl.Options.assert_called_once_with(is_high_priority_stream=True)
        assert options._timeout == timedelta(seconds=7)
    else:
        assert options is None


@ranks(1)
def test_a_missing_gradient_is_made_on_the_callers_stream() -> None:
    """What another thread makes belongs to that thread's stream on a device."""
    makers: list[threading.Thread] = []
    real = torch.empty_like

    def noted(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        if isinstance(tensor, torch.nn.Parameter):
            makers.append(threading.current_thread())
        return real(tensor, **options)

    parameters = [(name, torch.nn.Parameter(torch.zeros(3))) for name in ("with", "without")]
    parameters[0][1].grad = torch.ones(3)
    sync = gradwire.Synchronizer(parameters, "dense")
    with mock.patch("torch.empty_like", noted):
        sync.synchronize()
    assert makers == [threading.current_thread()]
    assert parameters[1][1].grad is not None
    assert not parameters[1][1].grad.any()
    sync.close()


@ranks(1)
def test_what_the_wire_works_on_is_its_streams() -> None:
    """What is made on one stream and freed on another may be handed out while it is still read."""
    within: list[bool] = []
    made: list[bool] = []
    real = torch.empty_like

    @contextmanager
    def on_stream(wire: Wire) -> Iterator[None]:
        within.append(True)
        yield
        within.pop()

    def noted(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        if "dtype" in options:
            made.append(bool(within))
        return real(tensor, **options)

    model = DistributedDataParallel(torch.nn.Linear(8, 4, dtype=torch.bfloat16))
    handle = gradwire.compress(model, "dense")
    with mock.patch.object(Wire, "on_stream", on_stream), mock.patch("torch.empty_like", noted):
        model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    assert made
    assert all(made)
    handle.close()


@ranks(2)
def test_a_devices_backend_has_more_patience_than_the_wire() -> None:
    """The group is asked for its name with a tensor on the device; here that one is on the CPU."""
    group = dist.new_group(timeout=timedelta(seconds=77))
    assert isinstance(group, dist.ProcessGroup)
    with (
        mock.patch("gradwire.wire.sibling._new_name", return_value="of a device"),
        mock.patch("gradwire.wire.sibling.carrier_of", return_value=CUDA),
    ):
        sibling = sibling_of(group, CUDA)
    assert timeout_of(sibling) == timedelta(seconds=154)
    assert ProcessGroupTransport(sibling, timeout_of(group))._timeout == timedelta(seconds=77)
    dist.destroy_process_group(sibling)


@pytest.mark.parametrize("capturing", [True, False])
def test_a_graph_under_capture_is_refused(capturing: bool) -> None:
    engine = Engine(Configuration.make("dense", {}), 0, 2, torch.device("cpu"))
    asked: Callable[[], bool] = mock.Mock(return_value=capturing)
    with mock.patch("torch.cuda.is_current_stream_capturing", asked):
        engine.before_step()
        engine.store.device = CUDA
        if capturing:
            with pytest.raises(ConfigurationError, match=r"CUDA graph is captured.*no_sync"):
                engine.before_step()
        else:
            engine.before_step()
