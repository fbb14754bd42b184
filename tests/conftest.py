import gc
import multiprocessing.spawn
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

import pytest
import torch

import copies
from pool import Pool

torch.set_num_threads(1)


FIRST = [
    "attach/test_rehearsals.py",
    "wire/test_failures.py",
    "state/test_elastic.py",
    "bench/test_suite.py",
    "bench/test_bench_periodic.py",
    "bench",
    "cli",
    "lab",
    "cost",
    "state",
    "local_sgd",
    "wire",
    "attach",
    "optim",
    "methods/test_training.py",
    "methods/test_means.py",
    "methods",
]
"""Rehearsals compile every kernel, for minutes where none is on the disk; next comes what needs few or takes long.

One process takes a file, so the longest are not the last of their folder.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--injections", type=int, default=24, help="workers to kill, stop or make raise")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Of what is imported nothing goes: it is not looked through for garbage, neither meanwhile nor during tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries that count their objects complain of those that are left


def place(item: pytest.Item) -> int:
    path = item.path.as_posix()
    return next((number for number, part in enumerate(FIRST) if f"/tests/{part}" in path), len(FIRST))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Processes take whole files in that order, for what a file has set up and loaded serves all of its tests.

    Of frameworks they take all tests of a backend, which takes long to load; of JAX, which has most, in two parts;
    what needs no backend's processes comes last, one by one.
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            found = re.search(r"/frameworks/(test_keras)?.*\[(tensorflow|jax|torch)\b", nodeid)
            if found is None:
                return nodeid if "/frameworks/" in nodeid else str(super()._split_scope(nodeid))
            return f"{found[2]} {found[1]}" if found[2] == "jax" else found[2]

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def quick_python(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Gives a Python that begins as a copy of a process which has imported modules, see copies.py."""
    folder = tmp_path_factory.getbasetemp()
    return partial(copies.python, folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)


@pytest.fixture
def begun_quickly(quick_python: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Has what begins programs by ``sys.executable`` begin such copies, and what spawns processes."""
    resource_tracker.ensure_running()
    monkeypatch.setattr(sys, "executable", quick_python())
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(sys.executable))
