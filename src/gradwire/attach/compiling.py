"""Each kernel is compiled by one process of a machine, while others that need it wait for what it leaves on the disk.

Four workers on two busy cores take 12 s of processor time to attach ``topk`` for the first time on a machine instead of
32 (2026-11-22).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from numba.core import event

try:
    import fcntl
except ImportError:  # Windows has none; there each process compiles for itself
    fcntl = None  # type: ignore[assignment]


def lock_of(kernel: Any) -> Path | None:
    """What the process that compiles a kernel has locked: a file beside what it leaves; None of what is not kept."""
    folder, function = kernel._cache.cache_path, kernel.py_func
    if folder is None or not function.__module__.startswith("gradwire."):
        return None
    return Path(folder) / f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}.lock"


class CompiledElsewhereError(BaseException):
    """Another process compiles it; no Exception, which Numba might take for an error of what it compiles.

    Args:
        lock: What that process has locked.
    """

    def __init__(self, lock: Path) -> None:
        super().__init__(lock)
        self._lock = lock

    def wait(self) -> None:
        """Waits until that process has left it on the disk, or has ended."""
        with self._lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_SH)


@contextmanager
def compiling_once() -> Iterator[None]:
    """While this lasts, what is to be compiled no other process compiles; what is on the disk needs no lock.

    Raises:
        CompiledElsewhereError: If another process compiles it; wait for it and try again, to find it on the disk.
    """
    with ExitStack() as held:
        if fcntl is not None:
            held.enter_context(event.install_listener("numba:compile", _Compilation(held)))
        yield


class _Compilation(event.Listener):
    """Has kernels locked while Numba compiles and saves them: one, and those that call it."""

    def __init__(self, held: ExitStack) -> None:
        self._compiling: list[ExitStack] = []
        self._saving = held.enter_context(ExitStack())

    def on_start(self, event: Any) -> None:
        """Before a kernel is compiled."""
        self._saving.close()
        self._compiling.append(ExitStack())  # it ends where this raises, too
        self._compiling[-1].enter_context(_uncollected())
        if (lock := lock_of(event.data["dispatcher"])) is not None:
            self._compiling[-1].enter_context(_locked(lock))

    def on_end(self, event: Any) -> None:
        """Once it is compiled: what follows is that it is saved, and then that another begins or ends."""
        self._saving.close()
        self._saving.push(self._compiling.pop())


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is looked for, which takes a seventh of the time: among what torch has and Numba makes is little."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    with ExitStack() as held:
        with suppress(OSError):  # where no file can be written Numba will say so
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(lock.open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CompiledElsewhereError(lock) from None
        yield
