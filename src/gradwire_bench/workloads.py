"""The training tasks of the benchmarks: a model, its data in a fixed order, and how well it does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire_bench import data, text
from gradwire_bench.data import DIGITS, FASHION_MNIST, Dataset, DataSource, Images
from gradwire_bench.text import PYTHON_SOURCES, SYMBOLS, Text

IMAGE_SIDE = 28
CLASSES = 10
CONTEXT = 64
"""Bytes that the language model reads at a time."""
TARGET_ACCURACY = {FASHION_MNIST: 0.85, DIGITS: 0.90, PYTHON_SOURCES: 0.40}
"""Accuracy that dense training passes well before the end of a default run; the race is to reach it."""

_EVALUATION_BATCH = 250

Name = Literal["image", "language"]


@dataclass(frozen=True)
class Score:
    """What a model made of test samples; scores of several workers add up.

    Attributes:
        correct: Answers that were right.
        seen: Answers.
        nats: Sum of the cross entropies in nats.
    """

    correct: int
    seen: int
    nats: float


class Task(Protocol):
    """One worker's share of a training task."""

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and the classes ``int64[B]`` to answer with, without end."""

    def score(self, model: nn.Module, limit: int | None = None) -> Score:
        """How well a model, the plain module, does on this worker's share of the first ``limit`` test samples."""


class ConvNet(nn.Sequential):
    """Two convolutions and two dense layers for 28 by 28 grey images: 1.23 M parameters, 98 % of them in one matrix.

    The shape of LeNet and of VGG in small, with batch normalisation: few operations for each parameter, so the network
    is what limits data-parallel training, as it is for large models on many machines.

    Args:
        channels: Of the first convolution; the second has twice as many.
        hidden: Units of the layer before the last.
    """

    def __init__(self, channels: int = 32, hidden: int = 384) -> None:
        super().__init__(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * channels * (IMAGE_SIDE // 4) ** 2, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, CLASSES),
        )


class ByteNet(nn.Module):
    """A language model of bytes: embedding, one GRU layer, and a score for each byte that may come next.

    114 k parameters at its defaults.

    Args:
        embedding: Length of the vector that stands for a byte.
        hidden: Units of the GRU.
    """

    def __init__(self, embedding: int = 48, hidden: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, embedding)
        self.recurrence = nn.GRU(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, SYMBOLS)

    def forward(self, read: Tensor) -> Tensor:
        """Scores ``float32[B * T, 256]`` of the byte after each of ``read``, ``int64[B, T]``."""
        states, _ = self.recurrence(self.embedding(read))
        scores: Tensor = self.head(states.flatten(0, 1))
        return scores


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

    def score(self, model: nn.Module, limit: int | None = None) -> Score:
        """How well a model names this worker's share of the test images.

        Args:
            model: The plain module, not its DDP wrapper.
            limit: Use only the first ``limit`` test images of all workers together.
        """
        images = self._images.test_images[:limit][self._rank :: self._world_size]
        labels = torch.from_numpy(self._images.test_labels[:limit][self._rank :: self._world_size])
        pieces = range(0, len(images), _EVALUATION_BATCH)
        return _score(
            model,
            (
                (self._inputs(images[start : start + _EVALUATION_BATCH]), labels[start : start + _EVALUATION_BATCH])
                for start in pieces
            ),
        )

    def _inputs(self, images: npt.NDArray[np.uint8]) -> Tensor:
        """``float32[B, 1, 28, 28]`` with mean 0 and deviation 1; other sizes are interpolated to 28 by 28."""
        pixels = (
            torch.from_numpy(images.astype(np.float32)).div_(255).sub_(self._mean).div_(self._deviation).unsqueeze(1)
        )
        if pixels.shape[-1] == IMAGE_SIDE:
            return pixels
        return F.interpolate(pixels, size=(IMAGE_SIDE, IMAGE_SIDE), mode="bilinear", align_corners=False)


class LanguageTask:
    """The next byte of a text, on one worker's share of every batch; the same seed gives the same batches.

    Args:
        source: The text; each worker holds it all and takes its own part.
        rank: This worker.
        world_size: Number of workers.
        batch: Pieces of 64 bytes a worker and step.
        seed: Seed of the order of the pieces.
    """

    def __init__(self, source: Text, *, rank: int, world_size: int, batch: int, seed: int) -> None:
        self._text, self._rank, self._world_size, self._batch, self._seed = source, rank, world_size, batch, seed

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This worker's part of an endless run of pieces that begin anywhere in the text."""
        order = np.random.default_rng(self._seed)
        size = self._batch * self._world_size
        while True:
            begins = order.integers(0, len(self._text.train) - CONTEXT, size)
            yield _pieces(self._text.train, begins[self._rank :: self._world_size])

    def score(self, model: nn.Module, limit: int | None = None) -> Score:
        """How well a model foretells the bytes of this worker's share of the held-out text.

        Args:
            model: The plain module, not its DDP wrapper.
            limit: Use only so many pieces of 64 bytes of all workers together, spread evenly over the text.
        """
        begins = np.arange(0, len(self._text.test) - CONTEXT, CONTEXT)
        chosen = begins if limit is None else begins[:: max(len(begins) // limit, 1)][:limit]
        mine = chosen[self._rank :: self._world_size]
        pieces = range(0, len(mine), _EVALUATION_BATCH)
        return _score(model, (_pieces(self._text.test, mine[start : start + _EVALUATION_BATCH]) for start in pieces))


@dataclass(frozen=True)
class Workload:
    """A model and what it learns.

    Attributes:
        name: As on the command line.
        what: The model, for titles.
        samples: What a batch counts.
        net: Makes the model; its start depends on torch's generator.
        small: Makes a model of some hundred kilobytes that learns the same.
        learning_rate: Of plain SGD at its peak.
        adam_rate: Of AdamW at its peak.
    """

    name: Name
    what: str
    samples: str
    net: Callable[[], nn.Module]
    small: Callable[[], nn.Module]
    learning_rate: float
    adam_rate: float

    def locate(self, dataset: Dataset = "auto") -> DataSource:
        """The data on this machine: images of that name, or the text."""
        return text.locate() if self.name == "language" else data.locate(dataset)

    def task(self, source: DataSource, *, rank: int, world_size: int, batch: int, seed: int) -> Task:
        """One worker's share of the task on the data of ``source``."""
        if self.name == "language":
            return LanguageTask(text.load(source), rank=rank, world_size=world_size, batch=batch, seed=seed)
        return ImageTask(data.load(source), rank=rank, world_size=world_size, batch=batch, seed=seed)


IMAGE = Workload("image", "CNN", "images", ConvNet, lambda: ConvNet(8, 128), 0.2, 0.003)
LANGUAGE = Workload("language", "GRU", f"pieces of {CONTEXT} bytes", lambda: ByteNet(64, 512), ByteNet, 2.0, 0.01)
WORKLOADS: dict[str, Workload] = {each.name: each for each in (IMAGE, LANGUAGE)}


def bits(nats: float) -> float:
    """Nats in bits."""
    return nats / math.log(2)


def _pieces(content: npt.NDArray[np.uint8], begins: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """The pieces that begin at ``begins``, ``int64[B, 64]``, and the byte after each byte, ``int64[B * 64]``."""
    pieces = torch.from_numpy(content[begins[:, None] + np.arange(CONTEXT + 1)].astype(np.int64))
    return pieces[:, :-1].contiguous(), pieces[:, 1:].flatten()


def _score(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> Score:
    correct, seen, nats = 0, 0, 0.0
    with torch.inference_mode():
        for inputs, wanted in batches:
            scores = model(inputs)
            correct += int((scores.argmax(dim=1) == wanted).sum())
            nats += float(F.cross_entropy(scores, wanted, reduction="sum"))
            seen += len(wanted)
    return Score(correct, seen, nats)
