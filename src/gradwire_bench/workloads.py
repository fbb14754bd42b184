"""What the benchmarks train: a model, its data, and with what learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, get_args

from torch import nn

from gradwire.errors import ConfigurationError
from gradwire_bench import data, ratings, text
from gradwire_bench.data import CIFAR10, DIGITS, FASHION_MNIST, IMAGENET, Dataset, DataSource
from gradwire_bench.nets import VGG16, AlexNet, ByteGPT, ByteNet, ConvNet, NeuMF, ResNet9, ResNet20, UNet
from gradwire_bench.tasks import CANVAS, CONTEXT, HITS, ImageTask, LanguageTask, PixelTask, RatingTask, Share, Task
from gradwire_bench.text import PYTHON_SOURCES

Name = Literal["image", "resnet20", "resnet9", "vgg16", "alexnet", "language", "lstm", "gpt", "ncf", "unet"]
NAMES: tuple[Name, ...] = get_args(Name)

TARGETS = {
    FASHION_MNIST: 0.85,
    DIGITS: 0.90,
    CIFAR10: 0.60,
    IMAGENET: 0.05,
    PYTHON_SOURCES: 0.40,
    ratings.MOVIELENS: 0.35,
}
"""Accuracy, or share of hits, that dense training passes well before the end of a default run; of CIFAR-10 and ImageNet
guesses."""

_LARGE = 32
"""Side of the images that residual nets and AlexNet get."""


@dataclass(frozen=True)
class Workload:
    """A model and what it learns.

    Attributes:
        name: As on the command line.
        what: The model, for titles.
        kind: What it learns from.
        samples: What a batch counts.
        net: Makes the model, of images by their colours and classes; its start depends on torch's generator.
        small: Makes a model of some hundred kilobytes that learns the same.
        learning_rate: Of plain SGD at its peak.
        adam_rate: Of AdamW at its peak.
        batch: Samples a worker and step, where many small steps are trained.
        measure: What the share of right answers is called.
        side: Of its images.
    """

    name: Name
    what: str
    kind: Literal["images", "text", "ratings", "canvases"]
    samples: str
    net: Callable[..., nn.Module]
    small: Callable[..., nn.Module]
    learning_rate: float
    adam_rate: float
    batch: int
    measure: str = "accuracy"
    side: int = 28

    def locate(self, dataset: Dataset = "auto") -> DataSource:
        """The data on this machine: images of that name, the text, or the ratings."""
        match self.kind:
            case "text":
                return text.locate()
            case "ratings":
                return ratings.locate()
            case "canvases" if dataset in ("cifar10", "imagenet"):
                raise ConfigurationError(f"{self.name} composes items on black; take fashion-mnist or digits for them")
            case _:
                return data.locate(dataset)

    def model(self, source: DataSource, *, small: bool = False) -> nn.Module:
        """A model for the data of ``source``."""
        make = self.small if small else self.net
        return make(colours=source.colours, classes=source.classes) if self.kind == "images" else make()

    def task(self, source: DataSource, share: Share) -> Task:
        """One worker's share of the task on the data of ``source``."""
        match self.kind:
            case "text":
                return LanguageTask(_text(source), share)
            case "ratings":
                return RatingTask(_ratings(source), share)
            case "canvases":
                return PixelTask(_images(source), share)
            case "images":
                return ImageTask(_images(source), share, self.side)

    def target(self, source: DataSource) -> float:
        """The share of right answers to reach."""
        return _PIXEL_TARGET if self.kind == "canvases" else TARGETS[source.name]


def _neumf() -> NeuMF:
    return NeuMF(ratings.USERS, ratings.ITEMS)


_PIXEL_TARGET = 0.40
_PIECES, _PAIRS = f"pieces of {CONTEXT} bytes", "ratings, four others with each"

IMAGE = Workload("image", "CNN", "images", "images", ConvNet, partial(ConvNet, 8, 128), 0.2, 0.003, 16)
LANGUAGE = Workload("language", "GRU", "text", _PIECES, lambda: ByteNet(64, 512), ByteNet, 2.0, 0.01, 8)
WORKLOADS: dict[str, Workload] = {
    each.name: each
    for each in (
        IMAGE,
        Workload(
            "resnet20", "ResNet-20", "images", "images", ResNet20, partial(ResNet20, 8), 0.2, 0.003, 16, side=_LARGE
        ),
        Workload(
            "resnet9",
            "ResNet-9",
            "images",
            "images",
            ResNet9,
            partial(ResNet9, 8, stride=2),
            0.2,
            0.003,
            8,
            side=_LARGE,
        ),
        Workload("vgg16", "VGG-16", "images", "images", VGG16, partial(VGG16, 8), 0.1, 0.001, 8, side=_LARGE),
        Workload(
            "alexnet", "AlexNet", "images", "images", AlexNet, partial(AlexNet, 16, 128), 0.1, 0.001, 8, side=_LARGE
        ),
        LANGUAGE,
        Workload(
            "lstm",
            "LSTM",
            "text",
            _PIECES,
            lambda: ByteNet(64, 512, nn.LSTM),
            lambda: ByteNet(recurrence=nn.LSTM),
            4.0,
            0.01,
            8,
        ),
        Workload("gpt", "small GPT", "text", _PIECES, ByteGPT, lambda: ByteGPT(64, 2), 0.5, 0.003, 8),
        Workload("ncf", "NeuMF", "ratings", _PAIRS, _neumf, _neumf, 2.0, 0.01, 64, measure=f"share of hits in {HITS}"),
        Workload(
            "unet",
            "U-Net",
            "canvases",
            f"canvases of {CANVAS} by {CANVAS}",
            UNet,
            lambda: UNet(width=8),
            3.0,
            0.01,
            4,
            measure="intersection over union",
        ),
    )
}


def bits(nats: float) -> float:
    """Nats in bits."""
    return nats / math.log(2)


@cache
def _images(source: DataSource) -> data.Images:
    return data.load(source)


@cache
def _text(source: DataSource) -> text.Text:
    return text.load(source)


@cache
def _ratings(source: DataSource) -> ratings.Ratings:
    return ratings.load(source)
