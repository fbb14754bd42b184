"""Starting workers, following what they print, and ending them."""

from __future__ import annotations

import codecs
import math
import os
import platform
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from gradwire.errors import LabError
from gradwire.lab.keeper import receive_message, send_message

LineCallback = Callable[[int, str], object]
"""Called with a worker's rank and a line it printed, without the line's end."""

_KEEPER = Path(__file__).with_name("keeper.py")
_TAIL_LINES = 20
_PIPE_BYTES = 65536
_LONGEST_WAIT = 3600.0  # seconds; what can be asked of the kernel at once is limited


@dataclass(frozen=True)
class RunResult:
    """What the workers of a run left.

    Attributes:
        outputs: What each worker wrote to its standard output, by rank.
        seconds: Wall-clock time from the first worker's start to the last one's end.
    """

    outputs: list[str]
    seconds: float


def elsewhere() -> str:
    """Why a lab cannot be opened on this system; empty on Linux."""
    system = platform.system()
    if system == "Linux":
        return ""
    return f"a lab, of workers over plain loopback too, needs Linux, and this is {system}; take a container or WSL"


class KeeperClient:
    """The lab's end of the conversation with its keeper, a process that owns namespaces and workers.

    A context manager; leaving it ends the keeper and with it everything that it owns.
    """

    def __init__(self) -> None:
        if why := elsewhere():
            raise LabError(why)
        self._control, theirs = socket.socketpair()
        self._notices: deque[dict[str, Any]] = deque()
        self._in_the_middle = False
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_KEEPER), str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C on the terminal is the lab's to handle
            )

    def __enter__(self) -> KeeperClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the keeper and everything that it owns; returns when they have ended."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold a copy of the socket
        try:
            self._process.wait()
        finally:
            self._control.close()

    def fileno(self) -> int:
        """Returns the descriptor that is readable when a notice may be waiting."""
        return self._control.fileno()

    def request(self, operation: str, descriptors: tuple[int, ...] = (), **arguments: Any) -> Any:
        """Asks the keeper for something and waits for its reply.

        Args:
            operation: One of the keeper's requests.
            descriptors: Open files that it is to have.
            **arguments: The request's own, of what JSON can say.

        Returns:
            The reply.

        Raises:
            LabError: The keeper could not do it, or is gone.
        """
        with self._whole_messages():
            send_message(self._control, {"op": operation, **arguments}, descriptors)
            while True:
                message = self._receive()
                if "error" in message:
                    raise LabError(str(message["error"]))
                if "reply" in message:
                    return message["reply"]
                self._notices.append(message)

    @property
    def has_notices(self) -> bool:
        """True if a notice arrived ahead of a reply and has not been taken."""
        return bool(self._notices)

    def notices(self) -> list[dict[str, Any]]:
        """Returns the notices that have arrived, each the rank of a worker that ended and its exit code."""
        with selectors.DefaultSelector() as selector, self._whole_messages():
            selector.register(self._control, selectors.EVENT_READ)
            while selector.select(0):
                self._notices.append(self._receive())
        arrived = list(self._notices)
        self._notices.clear()
        return arrived

    @contextmanager
    def _whole_messages(self) -> Iterator[None]:
        """Ends the keeper if the conversation breaks off, by Ctrl-C say: half a message cannot be taken up again.

        Nor is it if a second Ctrl-C comes before that: who asks next would take the reply that is left for its own.
        """
        if self._in_the_middle:
            raise self._gone()
        self._in_the_middle = True
        try:
            yield
        except LabError:
            self._in_the_middle = False
            raise
        except OSError:
            raise self._gone() from None
        except BaseException:
            self.close()
            raise
        self._in_the_middle = False

    def _receive(self) -> dict[str, Any]:
        received = receive_message(self._control)
        if received is None:
            raise self._gone()
        return received[0]

    def _gone(self) -> LabError:
        return LabError(
            f"the process that holds the lab (pid {self._process.pid}) has ended, and the workers with it: open a new "
            "lab, and if no interruption ended this one, look for what killed the process, such as lack of memory"
        )


class _Stream:
    """One worker's standard output or error: split into lines, told to a callback, kept."""

    def __init__(self, rank: int, descriptor: int, on_line: LineCallback | None, keep: int | None) -> None:
        self.descriptor = descriptor
        self.muted = False
        self._rank = rank
        self._on_line = on_line
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._partial = ""
        self._lines: deque[str] = deque(maxlen=keep)

    def read(self) -> bool:
        """Takes what is there; returns False at the end of the stream."""
        data = os.read(self.descriptor, _PIPE_BYTES)
        *lines, self._partial = (self._partial + self._decoder.decode(data, final=not data)).split("\n")
        for line in lines:
            self._tell(line, "\n")
        if not data and self._partial:
            self._tell(self._partial, "")
            self._partial = ""
        return bool(data)

    def text(self) -> str:
        """Returns what was kept."""
        return "".join(self._lines)

    def _tell(self, line: str, end: str) -> None:
        self._lines.append(line + end)
        if self._on_line is not None and not self.muted:
            self._on_line(self._rank, line)


class Run:
    """One command run once a worker, from start to end.

    Args:
        keeper: The keeper that starts the workers.
        argv: The command.
        environments: Each worker's whole environment, by rank.
        cwd: The workers' working directory.
        grace: Seconds between asking a worker to end (SIGTERM) and making it (SIGKILL).
        on_line: Told each line of a worker's standard output.
        on_error_line: Told each line of a worker's standard error.
    """

    def __init__(
        self,
        keeper: KeeperClient,
        argv: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        cwd: str,
        grace: float,
        on_line: LineCallback | None,
        on_error_line: LineCallback | None,
    ) -> None:
        self._keeper = keeper
        self._argv = list(argv)
        self._environments = environments
        self._cwd = cwd
        self._grace = grace
        self._on_line = on_line
        self._on_error_line = on_error_line
        self._outputs: list[_Stream] = []
        self._errors: list[_Stream] = []
        self._running: set[int] = set()
        self._failed: tuple[int, int] | None = None
        self._heard = 0.0

    def finish(self, timeout: float | None, silence: float | None = None) -> RunResult:
        """Starts the workers and waits for them to end.

        Args:
            timeout: Seconds that the workers have; None for as long as they need.
            silence: Seconds that may pass without a line of any worker; None for as long as they like.

        Returns:
            What they left.

        Raises:
            LabError: A worker could not start or failed, or time ran out; the others have been ended.
        """
        started = self._heard = time.monotonic()
        deadline = math.inf if timeout is None else started + timeout
        patience = math.inf if silence is None else silence
        with selectors.DefaultSelector() as selector:
            selector.register(self._keeper, selectors.EVENT_READ)
            try:
                for rank, environment in enumerate(self._environments):
                    self._start(rank, environment, selector)
                self._follow(selector, deadline, patience)
                failed, late, quiet = self._failed, sorted(self._running), time.monotonic() < deadline
                if failed or late:
                    self._end(selector)
            except BaseException:
                self._mute()
                with suppress(LabError):
                    self._end(selector)
                raise
            finally:
                for stream in self._outputs + self._errors:
                    os.close(stream.descriptor)
        if failed:
            raise self._failure(*failed)
        if late:
            what = f"said nothing for {silence:g} s" if quiet else f"did not finish within {timeout:g} s"
            raise self._lateness(late, what)
        return RunResult([stream.text() for stream in self._outputs], time.monotonic() - started)

    def _start(self, rank: int, environment: Mapping[str, str], selector: selectors.BaseSelector) -> None:
        output, output_write = os.pipe()
        error, error_write = os.pipe()
        streams = [_Stream(rank, output, self._on_line, None), _Stream(rank, error, self._on_error_line, _TAIL_LINES)]
        self._outputs.append(streams[0])
        self._errors.append(streams[1])
        for stream in streams:
            os.set_blocking(stream.descriptor, False)
            selector.register(stream.descriptor, selectors.EVENT_READ, stream)
        try:
            self._keeper.request(
                "spawn",
                (output_write, error_write),
                rank=rank,
                namespace=rank,
                argv=self._argv,
                env=dict(environment),
                cwd=self._cwd,
            )
        except LabError as refusal:
            raise LabError(f"cannot start worker {rank} as {self._argv!r} in {self._cwd}: {refusal}") from None
        finally:
            os.close(output_write)
            os.close(error_write)
        self._running.add(rank)

    def _follow(self, selector: selectors.BaseSelector, deadline: float, patience: float) -> None:
        """Passes on what workers print until all have ended, one has failed, or time is up."""
        while self._running and self._failed is None:
            wait = min(deadline, self._heard + patience) - time.monotonic()
            if wait <= 0:
                return
            self._attend(selector, min(wait, _LONGEST_WAIT))
        if self._failed is None:
            self._drain(selector)

    def _end(self, selector: selectors.BaseSelector) -> None:
        """Ends the workers that still run and takes the last of what they printed."""
        try:
            if self._running:
                self._keeper.request("end", grace=self._grace)
            while self._running:
                self._attend(selector, None)
            self._drain(selector)
        except BaseException:
            self._keeper.close()  # at once, and no worker is left for the lab's next run to stumble on
            raise

    def _attend(self, selector: selectors.BaseSelector, wait: float | None) -> None:
        """Waits for something to happen, passes on what was printed, and notes who has ended."""
        for key, _ in selector.select(0 if self._keeper.has_notices else wait):
            if key.fileobj is not self._keeper:
                self._read(key.data, selector)
        for notice in self._keeper.notices():
            rank, code = int(notice["exited"]), int(notice["code"])
            self._running.discard(rank)
            if code != 0 and self._failed is None:
                self._failed = (rank, code)

    def _drain(self, selector: selectors.BaseSelector) -> None:
        """Reads what the pipes still hold; with all of the workers gone nothing more can come."""
        while ready := [key for key, _ in selector.select(0) if key.data is not None]:
            for key in ready:
                self._read(key.data, selector)

    def _read(self, stream: _Stream, selector: selectors.BaseSelector) -> None:
        self._heard = time.monotonic()
        if not stream.read():
            selector.unregister(stream.descriptor)

    def _mute(self) -> None:
        for stream in self._outputs + self._errors:
            stream.muted = True

    def _failure(self, rank: int, code: int) -> LabError:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return LabError(f"worker {rank} of {len(self._environments)} {how}; the others were ended. {self._tail(rank)}")

    def _lateness(self, late: list[int], what: str) -> LabError:
        ranks = ", ".join(map(str, late))
        return LabError(
            f"the workers {what}: still running, and now ended, were those of rank {ranks}; give run more time, or "
            f"find what they wait for. {self._tail(late[0])}"
        )

    def _tail(self, rank: int) -> str:
        text = self._errors[rank].text().rstrip()
        if not text:
            return f"Worker {rank} wrote nothing to its standard error."
        return f"The end of worker {rank}'s standard error:\n{text}"
