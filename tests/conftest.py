from collections.abc import Iterator

import pytest
import torch

from pool import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()
