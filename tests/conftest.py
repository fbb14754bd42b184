from collections.abc import Iterator

import pytest
import torch

from pool import Pool

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--injections", type=int, default=24, help="workers to kill, stop or make raise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Kernels come first: they are compiled once then, and not by every worker of a world at the same time."""
    items.sort(key=lambda item: not item.path.name.startswith("test_kernels"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()
