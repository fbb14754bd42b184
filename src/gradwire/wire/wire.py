"""The one thread that touches the network: it encodes, issues, waits and decodes, in order of submission."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from gradwire.errors import GradwireError
from gradwire.wire.meter import Meter
from gradwire.wire.requests import Synchronization
from gradwire.wire.scheduler import Scheduler, Task
from gradwire.wire.transport import Transport

CLOSE_SECONDS = 5.0
"""How long closing waits for work that is under way."""

TensorFuture = torch.futures.Future[torch.Tensor]

Result = TypeVar("Result")


class Wire:
    """Runs synchronizations on a thread of its own.

    Gradients are read and written on that thread. On a GPU it has a stream of its own, which first waits for the
    stream that submitted; the futures it resolves carry its events to whoever waits on them.

    Args:
        transport: Where to send; nothing else may use it.
        meter: What to count with.
        fuse_bytes: Payload to gather before a collective is issued, in bytes.
        device: Where the gradients live.
    """

    def __init__(self, transport: Transport, meter: Meter, fuse_bytes: int, device: torch.device) -> None:
        self._scheduler = Scheduler(transport, meter, fuse_bytes)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._promised: dict[TensorFuture, None] = {}
        self._failure: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="gradwire", daemon=True)
        self._thread.start()

    def promise(self) -> TensorFuture:
        """A future that some submitted work will keep; if the wire fails first, the future carries its exception.

        Raises:
            GradwireError: If an earlier step failed or the wire is closed.
        """
        self._check()
        if self._closed:
            raise GradwireError("the handle was removed; attach again with gradwire.compress")
        future: TensorFuture = torch.futures.Future(devices=[self._device] if self._stream is not None else None)
        self._promised[future] = None
        return future

    def keep(self, future: TensorFuture, result: torch.Tensor) -> None:
        """Resolves a promised future; to be called on the wire's thread."""
        del self._promised[future]
        future.set_result(result)

    def submit(
        self,
        begin: Callable[[], Sequence[Synchronization]],
        on_done: Callable[[], None],
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """Queues synchronizations that finish together.

        Args:
            begin: Makes the generators; called on the wire's thread.
            on_done: Called on the wire's thread once all of them have ended.
            on_end: Given with the last submission of a step; called on the wire's thread once all of them have ended.
        """
        ready = torch.cuda.current_stream(self._device).record_event() if self._stream is not None else None

        def order() -> None:
            if self._failure is not None:
                raise self._failure
            if ready is not None and self._stream is not None:
                self._stream.wait_event(ready)
            self._scheduler.submit(Task(begin(), on_done))
            if on_end is not None:
                self._scheduler.flush()
                on_end()

        self._orders.put(order)

    def call(self, work: Callable[[], Result]) -> Result:
        """Runs ``work`` on the wire's thread, after everything that was submitted, and returns what it returns.

        Raises:
            GradwireError: If a step failed.
        """
        answer: Future[Result] = Future()

        def order() -> None:
            try:
                self._check()
                answer.set_result(work())
            except Exception as error:
                answer.set_exception(error)

        if self._closed:
            order()
        else:
            self._orders.put(order)
        return answer.result()

    def close(self) -> None:
        """Ends the thread once it has done what was submitted; a thread stuck in a collective is left to the exit."""
        self._closed = True
        self._orders.put(None)
        self._thread.join(timeout=CLOSE_SECONDS)

    def _run(self) -> None:
        with self._on_stream():
            while (order := self._orders.get()) is not None:
                try:
                    order()
                except Exception as error:
                    self._fail(error)

    def _check(self) -> None:
        if self._failure is not None:
            raise GradwireError(
                f"an earlier step failed: {self._failure!r}; start a new process group and attach again"
            ) from self._failure

    def _on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def _fail(self, error: Exception) -> None:
        """Hands an exception to all who wait, and takes no more work."""
        self._failure = error
        self._scheduler.abandon()
        while self._promised:
            future, _ = self._promised.popitem()
            future.set_exception(error)  # type: ignore[arg-type]
