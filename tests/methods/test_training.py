"""Every method trains a real model on real images as well as dense averaging does."""

from __future__ import annotations

from dataclasses import dataclass, field
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
EPOCHS = 16


@dataclass(frozen=True)
class Settings:
    """With what a method trains a small network in a few hundred steps."""

    options: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 0.05
    momentum: float = 0.9


SIGNS = Settings(learning_rate=0.004, momentum=0.0)  # every coordinate moves by it
OWN_MOMENTUM = Settings({"ratio": 0.1}, learning_rate=0.3, momentum=0.0)  # forgotten wherever it was sent
SETTINGS = {
    "signsgd": SIGNS,
    "signum": SIGNS,
    "lion": SIGNS,
    "demo": SIGNS,
    "dion": Settings(learning_rate=0.03, momentum=0.0),
    "dgc": OWN_MOMENTUM,
    "sketchedsgd": OWN_MOMENTUM,
    "topk": Settings({"ratio": 0.05}),
    "ef21": Settings({"ratio": 0.1}),
    "ef21sgdm": Settings({"ratio": 0.1}, learning_rate=0.3, momentum=0.0),
    "blocksgdm": Settings(learning_rate=0.3, momentum=0.0),
    "randomk": Settings({"ratio": 0.1}),
    "gtopk": Settings({"ratio": 0.05}),
    "oktopk": Settings({"ratio": 0.05}),
    "scalecom": Settings({"ratio": 0.05}),
    "sidco": Settings({"ratio": 0.05}),
    "dryden": Settings({"ratio": 0.05}),
    "sketchml": Settings({"ratio": 0.1}),
    "adaptive": Settings({"memory": "residual"}),
    "gradiveq": Settings({"learn_steps": 20, "use_steps": 80}),
}


def accuracy(method: str) -> float:
    """Test accuracy after some epochs on 1,297 of scikit-learn's digits, in percent of the 500 others."""
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
    chosen = SETTINGS.get(method, Settings())
    handle = gradwire.compress(model, method, **chosen.options)
    optimizer = torch.optim.SGD(model.parameters(), lr=chosen.learning_rate, momentum=chosen.momentum)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, chosen.learning_rate, total_steps=EPOCHS * (len(train) // 64), cycle_momentum=False
    )
    shuffle = torch.Generator().manual_seed(3)
    for _ in range(EPOCHS):
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
def test_accuracy_is_within_two_percent_of_dense(pool: Pool, dense: float, method: str) -> None:
    assert dense > 95
    assert pool.run(WORKERS, accuracy, method)[0] >= dense - 2
