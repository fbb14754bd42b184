"""Rehearsals: what they leave to do. They come first, see conftest.py."""

from __future__ import annotations

import errno
import fcntl
import gc
import importlib
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numba
import pytest
import torch
from numba.core import caching
from numba.core.dispatcher import Dispatcher

from catalogue import OPTIONS
from codec_checks import check_compiled_once
from gradwire import methods
from gradwire.attach import rehearsal
from gradwire.attach.rehearsal import rehearse
from gradwire.engine.configuration import Configuration
from gradwire.errors import ConfigurationError
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld
from pool import FORKING


def compiled() -> dict[tuple[str, str], int]:
    return {
        (module, name): len(function.signatures)
        for module in list(sys.modules)
        if module.startswith("gradwire.kernels.cpu")
        for name, function in vars(sys.modules[module]).items()
        if isinstance(function, Dispatcher)
    }


def nothing_is_compiled_after_a_rehearsal(names: list[str]) -> None:
    slots = flat_slots([("conv", (64, 32, 3, 3)), ("matrix", (129, 65)), ("bias", (129,))])
    for name in names:
        for options in [{}, *OPTIONS.get(name, [])]:
            for route in methods.get(name).routes:
                configuration = Configuration.make(name, options, route=route)
                rehearse(configuration)
                before = compiled()
                world = LocalWorld(configuration, slots, 3)
                for _ in range(4):
                    world.average([torch.randn(slots[-1].stop) for _ in range(3)])
                assert compiled() == before, (configuration, set(compiled().items()) - set(before.items()))
    check_compiled_once(*(module.rpartition(".")[2] for module, _ in compiled()))


CHOOSING = [name for name in methods.names() if methods.get(name)().selects]
OTHERS = [name for name in methods.names() if name not in CHOOSING]


@pytest.mark.parametrize("names", [CHOOSING, OTHERS], ids=["choosing", "others"])
def test_a_rehearsal_leaves_nothing_to_compile_in_a_training_step(names: list[str]) -> None:
    """In a process of their own; methods that choose coordinates have few kernels in common with others."""
    with ProcessPoolExecutor(1, FORKING, torch.set_num_threads, (1,)) as process:
        process.submit(nothing_is_compiled_after_a_rehearsal, names).result()


def test_kernels_can_be_compiled_where_those_they_call_were_loaded() -> None:
    """Numba cannot compile a caller of a generator that it has loaded from the disk: a second method would fail."""
    importlib.import_module("gradwire.kernels.cpu")
    functions = [vars(sys.modules[module])[name] for module, name in compiled()]
    assert functions
    assert [function for function in functions if inspect.isgeneratorfunction(function.py_func)] == []


@pytest.mark.parametrize("looked_for", [True, False])
def test_garbage_is_looked_for_as_before_after_kernels_were_compiled(looked_for: bool, tmp_path: Path) -> None:
    during = []
    kernel = own_kernel(tmp_path, lambda: during.append(gc.isenabled()))
    if not looked_for:
        gc.disable()
    try:
        kernel(1)
        assert (during, gc.isenabled()) == ([False], looked_for)
    finally:
        gc.enable()


def test_what_was_rehearsed_is_not_rehearsed_again() -> None:
    """In the same process, and with all choices the same."""
    with (
        mock.patch.object(rehearsal, "LocalWorld", wraps=LocalWorld) as worlds,
        mock.patch.object(rehearsal, "_rehearsed", set()),
    ):
        for expected, ratio in ((1, 0.25), (1, 0.25), (2, 0.5), (2, 0.25)):
            rehearse(Configuration.make("topk", {"ratio": ratio}))
            assert worlds.call_count == expected
        rehearse(Configuration.make("topk", {"ratio": 0.25}, memory="none"))
        assert worlds.call_count == 3


def test_a_long_rehearsal_says_what_it_does(caplog: pytest.LogCaptureFixture) -> None:
    for patience, aloud, lines in ((0.0, True, 1), (0.0, False, 0), (60.0, True, 0)):
        caplog.clear()
        end = time.monotonic() + 60

        def until_it_is_said(
            configuration: Configuration, device: torch.device, due: int = lines, end: float = end
        ) -> None:
            while len(caplog.messages) < due and time.monotonic() < end:
                time.sleep(0.01)

        with (
            mock.patch.object(rehearsal, "PATIENCE", patience),
            mock.patch.object(rehearsal, "_rehearsed", set()),
            mock.patch.object(rehearsal, "_run", until_it_is_said),
        ):
            rehearse(Configuration.make("topk", {"ratio": 0.25}), aloud=aloud)
        assert len(caplog.messages) == lines
        assert all("topk" in line and "compiles" in line for line in caplog.messages)


def own_kernel(folder: Path, compiling: Callable[[], object] = lambda: None) -> Any:
    """A function to compile, with a cache of its own, and what is called while it is compiled."""

    def one_more(number: int) -> int:
        return number + 1

    with mock.patch.object(numba.config, "CACHE_DIR", str(folder)):
        kernel: Any = importlib.import_module("gradwire.kernels.cpu._disk").keep(numba.njit(cache=True)(one_more))
    compile_it = kernel._compiler.compile

    def seen(*arguments: object) -> Any:
        compiling()
        return compile_it(*arguments)

    kernel._compiler.compile = seen
    return kernel


def locked(kernel: Any) -> bool:
    """Whether a process has it, as seen by another."""
    with kernel._cache.lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_one_process_compiles_a_kernel_and_others_wait_for_it(tmp_path: Path) -> None:
    """Whoever opens the lock is as good as another process."""
    seen: list[object] = []
    mine = own_kernel(tmp_path, lambda: seen.append(locked(mine)))
    theirs = own_kernel(tmp_path, lambda: seen.append("compiled again"))
    other = mine._cache.lock.open("a")
    fcntl.flock(other, fcntl.LOCK_EX)

    def release() -> None:
        seen.append("released")
        other.close()

    threading.Timer(0.5, release).start()
    assert mine(1) == 2
    assert seen == ["released", True]
    assert not locked(mine)
    assert theirs(1) == 2
    assert len(seen) == 2  # what the first left on the disk serves

    last = own_kernel(tmp_path)
    with last._cache.lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert last(1) == 2  # needs no lock: it is there


def test_what_was_left_while_a_process_waited_is_not_compiled_again(tmp_path: Path) -> None:
    mine, seen = own_kernel(tmp_path), list[str]()
    theirs = own_kernel(tmp_path, lambda: seen.append("compiled again"))
    load, looked = theirs._cache._cache_file.load, list[bool]()

    def after_the_first_look(key: object) -> Any:
        found = load(key)
        looked.append(found is not None)
        if len(looked) == 1:
            assert mine(1) == 2
        return found

    theirs._cache._cache_file.load = after_the_first_look
    assert theirs(1) == 2
    assert (looked, seen) == ([False, True], [])


def test_a_kernel_that_cannot_be_compiled_is_not_locked_for_ever(tmp_path: Path) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    kernel = own_kernel(tmp_path, fail)
    with pytest.raises(KeyboardInterrupt):
        kernel(1)
    assert not locked(kernel)
    assert gc.isenabled()


def test_a_copy_of_the_process_does_not_keep_a_lock(tmp_path: Path) -> None:
    """As a data loader's workers are, begun meanwhile."""
    copies: list[int] = []

    def copy() -> None:
        if (child := os.fork()) == 0:
            time.sleep(60)
        copies.append(child)

    kernel = own_kernel(tmp_path, copy)
    try:
        assert kernel(1) == 2
        assert not locked(kernel)
    finally:
        for child in copies:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    kernel = own_kernel(tmp_path)

    def compile_it(configuration: Configuration, device: torch.device) -> None:
        kernel(1)

    with (
        mock.patch.object(rehearsal, "_rehearsed", set()),
        mock.patch.object(rehearsal, "_run", compile_it),
        mock.patch.object(caching.IndexDataCacheFile, "save", side_effect=OSError(errno.ENOSPC, "No space left")),
        pytest.raises(ConfigurationError, match=r"No space left; make room there, or set NUMBA_CACHE_DIR"),
    ):
        rehearse(Configuration.make("topk", {"ratio": 0.25}))


def test_compilation_that_is_disabled_is_named() -> None:
    importlib.import_module("gradwire.kernels.cpu")
    with (
        mock.patch.object(numba.config, "DISABLE_JIT", 1),
        pytest.raises(ConfigurationError, match=r"NUMBA_DISABLE_JIT is set, .* unset it"),
    ):
        sys.modules["gradwire.kernels.cpu._compiled"].compiled(lambda: 0)


def test_kernels_that_can_be_kept_nowhere_say_what_to_set() -> None:
    importlib.import_module("gradwire.kernels.cpu")
    decorate = sys.modules["gradwire.kernels.cpu._compiled"].compiled
    with (
        mock.patch.object(caching.CompileResultCacheImpl, "_locator_classes", []),
        pytest.raises(ConfigurationError, match=r"beside .*test_rehearsals\.py .* set NUMBA_CACHE_DIR"),
    ):
        decorate(lambda: 0)
