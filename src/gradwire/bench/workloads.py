"""The training tasks of the benchmarks: a model, its data in a fixed order, and how well it does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.bench.data import DIGITS, FASHION_MNIST, Images

IMAGE_SIDE = 28
CLASSES = 10
TARGET_ACCURACY = {FASHION_MNIST: 0.85, DIGITS: 0.90}
"""Accuracy that dense training passes well before the end of a default run; the race is to reach it."""

_EVALUATION_BATCH = 250


class ConvNet(nn.Sequential):
    """Two convolutions and two dense layers for 28 by 28 grey images: 1.23 M parameters, 98 % of them in one matrix.

    The shape of LeNet and of VGG in small, with batch normalisation: few operations for each parameter, so the network
    is what limits data-parallel training, as it is for large models on many machines.
    """

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * (IMAGE_SIDE // 4) ** 2, 384),
            nn.BatchNorm1d(384),
            nn.ReLU(),
            nn.Linear(384, CLASSES),
        )


class ImageTask:
    """Image classification on one worker's share of every batch; the same seed gives every method the same batches.

    Args:
        images: The whole data set; each worker holds it all and takes its own part.
        rank: This worker.
        world_size: Number of workers.
        batch: Images a worker and step.
        seed: Seed of the order of the images.
    """

    def __init__(self, images: Images, *, rank: int, world_size: int, batch: int, seed: int) -> None:
        pixels = images.train_images
        self._mean, self._deviation = float(pixels.mean()) / 255, float(pixels.std()) / 255
        self._images, self._rank, self._world_size, self._batch, self._seed = images, rank, world_size, batch, seed

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This worker's part of an endless run through shuffled epochs; whole global batches only."""
        images = self._images
        order = np.random.default_rng(self._seed)
        size = self._batch * self._world_size
        while True:
            epoch = order.permutation(len(images.train_images))
            for start in range(0, max(len(epoch) - size, 0) + 1, size):
                mine = epoch[start : start + size][self._rank :: self._world_size]
                yield self._inputs(images.train_images[mine]), torch.from_numpy(images.train_labels[mine])

    def correct(self, model: nn.Module, limit: int | None = None) -> tuple[int, int]:
        """How many test images this worker's share holds, and how many of them the model names rightly.

        Args:
            model: The plain module, not its DDP wrapper.
            limit: Use only the first ``limit`` test images of all workers together.

        Returns:
            Correct answers and images seen, to be summed over workers.
        """
        images = self._images.test_images[:limit][self._rank :: self._world_size]
        labels = self._images.test_labels[:limit][self._rank :: self._world_size]
        correct = 0
        with torch.inference_mode():
            for start in range(0, len(images), _EVALUATION_BATCH):
                answers = model(self._inputs(images[start : start + _EVALUATION_BATCH])).argmax(dim=1)
                correct += int((answers == torch.from_numpy(labels[start : start + _EVALUATION_BATCH])).sum())
        return correct, len(images)

    def _inputs(self, images: npt.NDArray[np.uint8]) -> Tensor:
        """``float32[B, 1, 28, 28]`` with mean 0 and deviation 1; other sizes are interpolated to 28 by 28."""
        pixels = (
            torch.from_numpy(images).to(torch.float32).div_(255).sub_(self._mean).div_(self._deviation).unsqueeze(1)
        )
        if pixels.shape[-1] == IMAGE_SIDE:
            return pixels
        return F.interpolate(pixels, size=(IMAGE_SIDE, IMAGE_SIDE), mode="bilinear", align_corners=False)
