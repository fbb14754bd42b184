"""Every method trains a real model on real images as well as dense averaging does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import methods
from pool import Pool

WORKERS = 2
OPTIONS: dict[str, dict[str, Any]] = {
    "qsgd": {"bits": 4},
    "topk": {"ratio": 0.05},
    "randomk": {"ratio": 0.1},
    "powersgd": {"rank": 4},
    "acpsgd": {"rank": 4},
}


def accuracy(method: str) -> float:
    """Test accuracy after 25 epochs on 1,297 of scikit-learn's digits, in percent of the 500 others."""
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = (images.float() / 16).view(-1, 1, 8, 8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    test, train = order[:500], order[500:]
    torch.manual_seed(2)
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(288, 96), nn.ReLU(), nn.Linear(96, 10),
    )  # fmt: skip
    model = DistributedDataParallel(net)
    handle = gradwire.compress(model, method, **OPTIONS.get(method, {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=25 * (len(train) // 64))
    shuffle = torch.Generator().manual_seed(3)
    for _ in range(25):
        for batch in train[torch.randperm(len(train), generator=shuffle)].split(64):
            if len(batch) == 64:
                mine = batch[dist.get_rank() :: WORKERS]
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
                optimizer.step()
                schedule.step()
    handle.close()
    model.eval()
    with torch.no_grad():
        return 100 * float((model(images[test]).argmax(1) == labels[test]).float().mean())


@pytest.fixture(scope="module")
def dense(pool: Pool) -> float:
    return float(pool.run(WORKERS, accuracy, "dense")[0])


@pytest.mark.parametrize("method", methods.names())
def test_accuracy_is_within_one_percent_of_dense(pool: Pool, dense: float, method: str) -> None:
    assert dense > 95
    assert pool.run(WORKERS, accuracy, method)[0] >= dense - 1
