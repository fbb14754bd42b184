from collections.abc import Iterator

import pytest
import torch

from pool import Pool

torch.set_num_threads(1)


FIRST = ["test_rehearsals.py", "test_elastic.py", "test_suite.py", "test_bench_periodic.py", "test_failures.py"]
"""Rehearsals compile every kernel, which all processes of later tests load from the disk; the others take longest."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--injections", type=int, default=24, help="workers to kill, stop or make raise")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes run tests, which begin with equal shares of them, two have a half of the kernels each."""
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    if processes > 1 and items and "rehearsal_leaves_nothing" in items[1].name:
        items.insert(len(items) // processes, items.pop(1))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()
