from collections.abc import Iterator

import pytest
import torch

from pool import Pool

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--injections", type=int, default=24, help="workers to kill, stop or make raise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Rehearsals come first: they compile every kernel, which all processes of later tests load from the disk."""
    items.sort(key=lambda item: item.path.name != "test_rehearsals.py")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()
