"""Where compiled kernels are kept between processes, for as long as no source changes that they may come from.

One process of a machine compiles each, while others that need it wait for what it leaves: so four workers on two busy
cores take 12 s of processor time to attach ``topk`` for the first time on a machine instead of 32 (2026-11-22).
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from numba.core import caching
from numba.core.compiler_lock import global_compiler_lock

from gradwire import kernels, layout, randomness

try:
    import fcntl
except ImportError:  # Windows has none; there each process compiles for itself
    fcntl = None  # type: ignore[assignment]


def stamp_of(*sources: Path) -> str:
    """A hash of files, and of the Python files in folders."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        for file in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


STAMP = stamp_of(*map(Path, (*kernels.__path__, layout.__file__, randomness.__file__)))
"""Numba itself looks at a kernel's own file only, and not at those of what it calls."""


class Index(caching.IndexDataCacheFile):
    """What is kept of one kernel, by signature."""

    def _load_index(self) -> Any:
        try:
            return super()._load_index()  # type: ignore[no-untyped-call]
        except (AttributeError, ImportError):  # a class of its arguments has gone
            return {}


class Kept(caching.FunctionCache):
    """What is kept of one kernel under :data:`STAMP`; a process that finds nothing locks it, to compile it alone.

    Kernels call each other in one order, so no two processes wait for each other.

    Args:
        function: The kernel in Python.

    Attributes:
        lock: What the process that compiles it has locked.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        name = self._impl.filename_base
        self._cache_file = Index(self._cache_path, name, STAMP)  # type: ignore[no-untyped-call]
        self.lock = Path(self._cache_path) / f"{name}.lock"
        self._held = ExitStack()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What is there; else what another process leaves, or this one has the lock."""
        if (found := super().load_overload(sig, target_context)) is None:  # type: ignore[no-untyped-call]
            self._held.enter_context(_uncollected())
            self._held.enter_context(_locked(self.lock))
            found = super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        return found

    @contextmanager
    def released(self) -> Iterator[None]:
        """The lock is, at the end of this, in which one thread may compile."""
        with global_compiler_lock:
            try:
                yield
            finally:
                self._held.close()


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
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
                held.callback(fcntl.flock, file, fcntl.LOCK_UN)  # a process that was forked has it as well
        yield


def keep(dispatcher: Any) -> Any:
    """Has a compiled function kept between processes, and compiled by one of them."""
    kept, compile_it = Kept(dispatcher.py_func), dispatcher.compile

    def compile_once(signature: Any) -> Any:
        with kept.released():
            return compile_it(signature)

    dispatcher._cache, dispatcher.compile = kept, compile_once
    return dispatcher
