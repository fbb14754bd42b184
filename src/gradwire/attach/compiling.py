"""Kernels are compiled by one process of a machine, while the others wait for what it leaves on the disk.

Four workers on two busy cores take 12 s of processor time to attach ``topk`` for the first time on a machine instead of
32 (2026-11-22).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from numba.core import event

try:
    import fcntl
except ImportError:  # Windows has none; there each process compiles for itself
    fcntl = None  # type: ignore[assignment]

LOCK = "gradwire.lock"
"""A file beside the compiled kernels; whoever compiles has it locked."""


class CompiledElsewhereError(BaseException):
    """Another process compiles; no Exception, which Numba might take for an error of what it compiles.

    Args:
        lock: What that process has locked.
    """

    def __init__(self, lock: Path) -> None:
        super().__init__(lock)
        self._lock = lock

    def wait(self) -> None:
        """Waits until that process has done, or has ended."""
        with self._lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_SH)


@contextmanager
def compiling_alone() -> Iterator[None]:
    """While this lasts, what is to be compiled is compiled by this process alone; what is on the disk needs no lock.

    Raises:
        CompiledElsewhereError: If another process compiles; wait for it and try again, to find it on the disk.
    """
    with ExitStack() as held:
        if fcntl is not None:
            held.enter_context(event.install_listener("numba:compile", _Compilation(held)))
        yield


class _Compilation(event.Listener):
    """Takes the lock when Numba is about to compile the first of gradwire's kernels."""

    def __init__(self, held: ExitStack) -> None:
        self._held = held
        self._alone = False

    def on_start(self, event: Any) -> None:
        """Before anything is compiled."""
        dispatcher = event.data["dispatcher"]
        folder = dispatcher._cache.cache_path
        if self._alone or folder is None or not dispatcher.py_func.__module__.startswith("gradwire."):
            return
        lock = Path(folder) / LOCK
        with suppress(OSError):  # where no file can be written Numba will say so
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = self._held.enter_context(lock.open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CompiledElsewhereError(lock) from None
        self._alone = True

    def on_end(self, event: Any) -> None:
        """The lock is kept for what else is to be compiled."""
