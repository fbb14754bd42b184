"""The one thread that touches the network: it encodes, issues, waits and decodes, in order of submission."""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch

from gradwire.deferred import Later
from gradwire.errors import ConfigurationError, DivergenceError, GradwireError, WireError
from gradwire.wire.meter import Meter
from gradwire.wire.requests import Synchronization
from gradwire.wire.scheduler import Scheduler
from gradwire.wire.transport import Line

CLOSE_SECONDS = 5.0
"""How long closing waits for work that is under way before it breaks it off."""

LOOK_SECONDS = 1.0
"""Between two looks at what a device is at."""

TensorFuture = torch.futures.Future[torch.Tensor]

Result = TypeVar("Result")


class Wire:
    """Runs synchronizations on a thread of its own.

    Gradients are read and written on that thread. On a GPU it has a stream of its own, of high priority, which first
    waits for the stream that submitted; the futures it resolves carry its events to whoever waits on them. There the
    host waits for no collective, so another thread looks whether one takes too long.

    The first error ends the thread and breaks off what the other ranks are waiting for, so that none of them waits in
    vain.

    Args:
        transport: Where to send; nothing else may use it. Closed with the wire.
        meter: What to count with.
        fuse_bytes: Payload to gather before a collective is issued, in bytes.
        device: Where the gradients live.
        later: What the host is told of a step in the next.
    """

    def __init__(
        self, transport: Line, meter: Meter, fuse_bytes: int, device: torch.device, later: Later | None = None
    ) -> None:
        self._transport = transport
        self._scheduler = Scheduler(transport, meter, fuse_bytes, later)
        self._device = device
        self._stream = _stream_of(device)
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._promised: dict[TensorFuture, torch.Tensor | None] = {}
        self._resolved = threading.Condition()
        self._failing = threading.Lock()
        self._failed: str | None = None
        self._unraised: BaseException | None = None
        self._closed = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gradwire", daemon=True)
        _open.add(self)
        self._thread.start()
        self._watcher = threading.Thread(target=self._watch, name="gradwire watch", daemon=True)
        if self._stream is not None:
            self._watcher.start()

    def promise(self, otherwise: torch.Tensor | None = None) -> TensorFuture:
        """A future that some submitted work will keep.

        It never carries an exception, which would lose its type in DDP, and which torch would keep, with everything
        that its traceback refers to, for as long as the future lives, which is for ever where the future is among that.
        Whoever waits for it does so by :meth:`wait`, or asks :meth:`check`.

        Args:
            otherwise: What it holds if the wire fails. If None, it is empty then, and a wire that has failed promises
                nothing.

        Raises:
            GradwireError: If an earlier step failed or the wire is closed.
        """
        if self._closed:
            raise GradwireError("the handle was closed; wrap the model anew, if it is wrapped, and attach again")
        future: TensorFuture = torch.futures.Future(devices=[self._device] if self._stream is not None else None)
        with self._failing:
            if self._failed is None:
                self._promised[future] = otherwise
                return future
        if otherwise is None:
            self.check()
        else:
            future.set_result(otherwise)
        return future

    def keep(self, future: TensorFuture, result: torch.Tensor) -> None:
        """Resolves a promised future; to be called on the wire's thread."""
        del self._promised[future]
        self._resolve(future, result)

    def wait(self, future: TensorFuture) -> None:
        """Waits for a promised future.

        Raises:
            Exception: What failed on the wire's thread, as it was raised there.
        """
        with self._resolved:  # a signal may break this off, but not what torch waits for
            self._resolved.wait_for(future.done)
        future.wait()
        self.check()

    def check(self) -> None:
        """Raises what failed on the wire's thread, the first time as it was raised there.

        Raises:
            Exception: What failed.
            GradwireError: If that has been raised before.
        """
        if self._unraised is not None:
            # Its traceback will refer to the caller's model, whose reducer refers to this: nobody could free that ring.
            error, self._unraised = self._unraised, None
            try:
                raise error
            finally:
                del error
        if self._failed is not None:
            raise GradwireError(f"an earlier step failed, so this handle can do no more; {self._failed}")

    @contextmanager
    def whole(self) -> Iterator[None]:
        """To be around all that submits a step and waits for it: what breaks it off fails the wire.

        An interrupt may come between any two submissions. Half a step would meet the other half of the other ranks'
        in their next one; and where a whole one is not waited for, this rank would not take what all others take. A
        ConfigurationError changes nothing here, either.
        """
        try:
            yield
        except ConfigurationError:
            raise
        except BaseException as error:
            if not self._closed:
                self.fail(error, raised=True)
            raise

    def fail(self, error: BaseException, raised: bool = False) -> None:
        """Takes no more work, and ends what all ranks wait for; the first failure counts.

        Args:
            error: What failed.
            raised: Whether whoever submits and waits has it already.
        """
        with self._failing:
            if self._failed is not None:
                return
            self._unraised, self._failed = None if raised else error, f"{type(error).__name__}: {error}"
        if not isinstance(error, DivergenceError):  # the other ranks find out by themselves
            self._transport.abort()
        self._orders.put(None)

    def submit(
        self,
        begin: Callable[[], Sequence[Synchronization]],
        on_done: Callable[[], None],
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """Queues synchronizations that finish together; a wire that has failed drops them.

        Args:
            begin: Makes the generators; called on the wire's thread.
            on_done: Called on the wire's thread once all of them have ended.
            on_end: Given with the last submission of a step; called on the wire's thread once all of them have ended.
        """
        ready = torch.cuda.current_stream(self._device).record_event() if self._stream is not None else None

        def order() -> None:
            if ready is not None and self._stream is not None:
                self._stream.wait_event(ready)
            self._scheduler.submit(begin(), on_done, last=on_end is not None)
            if on_end is not None:
                on_end()

        if self._failed is None:
            self._orders.put(order)

    def call(self, work: Callable[[], Result]) -> Result:
        """Runs ``work`` on the wire's thread, after everything that was submitted, and returns what it returns.

        Raises:
            Exception: What ``work`` raises, which leaves the wire as it was; or what failed on the wire's thread.
        """
        if self._closed or threading.current_thread() is self._thread:
            self.check()
            self._scheduler.settle()
            return work()
        done, answer = self.promise(), Future[Result]()

        def order() -> None:
            self._scheduler.settle()
            try:
                answer.set_result(work())
            except Exception as error:
                answer.set_exception(error)
            self.keep(done, torch.empty(0, dtype=torch.float32))

        self._orders.put(order)
        self.wait(done)
        return answer.result()

    def close(self) -> None:
        """Ends the thread once it has done what was submitted, and closes the transport.

        What takes longer than 5 s is broken off. Whoever still waits for this rank gets an error then, and so does who
        waits for an unfinished step of its own.
        """
        if self._closed:
            return
        self._closed = True
        self._ended.set()
        _open.discard(self)
        self._orders.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                self._transport.abort()
                self._thread.join(CLOSE_SECONDS)
        if self._watcher.is_alive() and threading.current_thread() is not self._watcher:
            self._watcher.join(CLOSE_SECONDS)
        self._transport.close()

    def _watch(self) -> None:
        """Fails the wire when a device has been at a collective for too long, whatever its own thread waits for."""
        while self._failed is None and not self._ended.wait(LOOK_SECONDS):
            try:
                self._transport.look()
            except WireError as error:
                self.fail(error)

    def _run(self) -> None:
        torch.get_num_threads()  # else the thread's first product runs on as many as there are, and rounds otherwise
        if self._stream is not None:
            torch.cuda.set_device(self._device)
        with torch.no_grad(), self.on_stream():  # what it averages may have a graph, which its averages have no part in
            while self._failed is None and self._follow(self._orders.get()):
                pass
            if self._promised:
                self.fail(GradwireError("the handle was closed in the middle of a step"))
            if self._failed is not None:
                self._abandon()
                _open.discard(self)  # else its traceback would keep the handle

    def _follow(self, order: Callable[[], None] | None) -> bool:
        """Carries out an order and forgets it, and with it whoever gave it."""
        if order is None:
            return False
        try:
            order()
        except BaseException as error:
            self.fail(error)
        return True

    def on_stream(self) -> AbstractContextManager[object]:
        """Within it memory is the stream's that works on it, which may hand it on without waiting for any other."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def _resolve(self, future: TensorFuture, result: torch.Tensor) -> None:
        future.set_result(result)
        with self._resolved:
            self._resolved.notify_all()

    def _abandon(self) -> None:
        """Drops all work, and lets go whoever waits for it."""
        with self._failing:
            promised, self._promised = self._promised, {}
        self._scheduler.abandon()
        for future, otherwise in promised.items():
            self._resolve(
                future, torch.empty(0, device=self._device, dtype=torch.float32) if otherwise is None else otherwise
            )
        while not self._orders.empty():
            self._orders.get()


def _stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """A stream whose kernels go before those of backward, which are many; none on the CPU."""
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


_open: set[Wire] = set()


@atexit.register
def _close_all() -> None:
    """Ends all threads before the interpreter does, which would abort the process if one were in a collective."""
    for wire in list(_open):
        wire.close()


def _forget_all() -> None:
    """A process that was forked has none of the threads; whoever closes its handles would wait for them for ever."""
    for wire in _open:
        wire._closed = True
    _open.clear()


if hasattr(os, "register_at_fork"):  # Windows knows no forks
    os.register_at_fork(after_in_child=_forget_all)
