"""A small network that learns scikit-learn's digits in some seconds, and how well it did."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

EPOCHS = 16


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(288, 96), nn.ReLU(), nn.Linear(96, 10),
    )  # fmt: skip


@cache
def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images, labels, and the numbers of 500 to test with and of 1,297 to train with."""
    from sklearn.datasets import load_digits  # a second

    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    return (images.float() / 16).view(-1, 1, 8, 8), labels, order[:500], order[500:]


def train(optimizer: torch.optim.Optimizer, rate: float, give: Callable[[Tensor, Tensor], None]) -> None:
    """Takes a step for every batch.

    Args:
        optimizer: Of the network's parameters.
        rate: Its learning rate at its peak.
        give: Gives parameters their averaged gradients of a batch of 64: images and labels.
    """
    images, labels, _, numbers = load()
    total = EPOCHS * (len(numbers) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=total, cycle_momentum=False)
    shuffle = torch.Generator().manual_seed(3)
    for _ in range(EPOCHS):
        for batch in numbers[torch.randperm(len(numbers), generator=shuffle)].split(64):
            if len(batch) == 64:
                optimizer.zero_grad()
                give(images[batch], labels[batch])
                optimizer.step()
                schedule.step()


@torch.no_grad()
def accuracy(net: nn.Module) -> float:
    """On the images it has not seen, in percent."""
    images, labels, numbers, _ = load()
    return 100 * float((net(images[numbers]).argmax(1) == labels[numbers]).float().mean())
