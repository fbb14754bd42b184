"""The training tasks: data in a fixed order, shared out to workers, and how well a model does on what was held out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire_bench.data import Images
from gradwire_bench.folders import Files
from gradwire_bench.ratings import Ratings
from gradwire_bench.text import Text

CONTEXT = 64
"""Bytes that a language model reads at a time."""
CANVAS = 48
"""Side of a canvas of the segmentation task."""
ITEMS = 3
"""Images on a canvas."""
INK = 32
"""An image's pixels from this brightness on belong to its item."""
NEGATIVES = 4
"""Items that a user has not rated, for each that he has (He et al. 2017)."""
CANDIDATES, HITS = 99, 10
"""Items that the held-out one is ranked among, and the places at the top that count."""

_EVALUATION_BATCH = 250


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

    def __add__(self, other: Score) -> Score:
        return Score(self.correct + other.correct, self.seen + other.seen, self.nats + other.nats)


@dataclass(frozen=True)
class Share:
    """A worker's part of every batch and of the test samples; the same seed gives the same batches.

    Attributes:
        batch: Samples a worker and step.
        seed: Of their order.
        rank: This worker.
        world_size: Number of workers.
    """

    batch: int
    seed: int
    rank: int = 0
    world_size: int = 1

    @property
    def whole(self) -> int:
        """Samples of all workers in a step."""
        return self.batch * self.world_size

    @property
    def mine(self) -> slice:
        """Which of them are this worker's."""
        return slice(self.rank, None, self.world_size)


class Task(Protocol):
    """One worker's share of a training task."""

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and the classes to answer with, ``int64``, a whole number of them for each input, without end."""

    def score(self, model: nn.Module, limit: int | None = None) -> Score:
        """How well a model, the plain module, does on this worker's share of the first ``limit`` test samples."""


class ImageTask:
    """Image classification.

    Args:
        images: The whole data set, of which each worker takes its own part.
        share: This worker's.
        side: Of the images that the model gets. Images of 28 by 28 are padded to larger ones, others interpolated.
    """

    def __init__(self, images: Images, share: Share, side: int = 28) -> None:
        pixels = images.train_images
        self._mean, self._deviation = float(pixels.mean()) / 255, float(pixels.std()) / 255
        self._images, self._share, self._side = images, share, side

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This worker's part of an endless run through shuffled epochs; whole global batches only."""
        images, size = self._images, self._share.whole
        order = np.random.default_rng(self._share.seed)
        while True:
            epoch = order.permutation(len(images.train_images))
            for start in range(0, max(len(epoch) - size, 0) + 1, size):
                mine = epoch[start : start + size][self._share.mine]
                yield self._inputs(images.train_images[mine]), torch.from_numpy(images.train_labels[mine])

    def score(self, model: nn.Module, limit: int | None = None) -> Score:
        """How well a model names this worker's share of the test images.

        Args:
            model: The plain module, not its DDP wrapper.
            limit: Use only the first ``limit`` test images of all workers together.
        """
        images = self._images.test_images[:limit][self._share.mine]
        labels = torch.from_numpy(self._images.test_labels[:limit][self._share.mine])
        return _score(model, ((self._inputs(images[part]), labels[part]) for part in _parts(len(images))))

    def _inputs(self, images: npt.NDArray[np.uint8] | Files) -> Tensor:
        """``float32[B, C, side, side]`` with mean 0 and deviation 1."""
        bright = torch.from_numpy(np.asarray(images).astype(np.float32))
        pixels = bright.div_(255).sub_(self._mean).div_(self._deviation)
        missing = self._side - pixels.shape[-1]
        if missing == 0:
            return pixels
        if 0 < missing <= 4:
            edge = missing // 2
            return F.pad(pixels, (edge, missing - edge, edge, missing - edge), value=-self._mean / self._deviation)
        return F.interpolate(pixels, size=(self._side, self._side), mode="bilinear", align_corners=False)


class LanguageTask:
    """The next byte of a text; a sample is a piece of 64 bytes.

    Args:
        source: The text; each worker holds it all and takes its own part.
        share: This worker's.
    """

    def __init__(self, source: Text, share: Share) -> None:
        self._text, self._share = source, share

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This worker's part of an endless run of pieces that begin anywhere in the text."""
        order = np.random.default_rng(self._share.seed)
        while True:
            begins = order.integers(0, len(self._text.train) - CONTEXT, self._share.whole)
            yield _pieces(self._text.train, begins[self._share.mine])

    def score(self, model: nn.Module, limit: int | None = None) -> Score:
        """How well a model foretells the bytes of this worker's share of the held-out text.

        Args:
            model: The plain module, not its DDP wrapper.
            limit: Use only so many pieces of 64 bytes of all workers together, spread evenly over the text.
        """
        begins = np.arange(0, len(self._text.test) - CONTEXT, CONTEXT)
        chosen = begins if limit is None else begins[:: max(len(begins) // limit, 1)][:limit]
        mine = chosen[self._share.mine]
        return _score(model, (_pieces(self._text.test, mine[part]) for part in _parts(len(mine))))


class RatingTask:
    """Whether a user has rated an item; each user's last rating is held out (He et al. 2017, arXiv 1708.05031).

    Args:
        ratings: All of them; each worker takes its own part, and with each rating four items that the user has not
            rated.
        share: This worker's.
    """

    def __init__(self, ratings: Ratings, share: Share) -> None:
        self._ratings, self._share = ratings, share

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This worker's part of an endless run through shuffled epochs: pairs ``int64[5 B, 2]``, and 1 or 0."""
        order, train = np.random.default_rng(self._share.seed), self._ratings.train
        size, mine = self._share.whole, self._share.mine
        wanted = torch.tensor([1] + [0] * NEGATIVES).repeat(self._share.batch)
        while True:
            epoch = order.permutation(len(train))
            for start in range(0, len(epoch) - size + 1, size):
                chosen = train[epoch[start : start + size]]
                others = self._ratings.unrated(chosen[:, 0], NEGATIVES, order)
                items = np.concatenate((chosen[:, 1:], others), 1)[mine]
                users = np.repeat(chosen[mine, 0], 1 + NEGATIVES)
                yield torch.from_numpy(np.stack((users, items.ravel()), 1)), wanted

    def score(self, model: nn.Module, limit: int | None = None) -> Score:
        """How often the held-out item is among the first ten of a hundred; the cross entropy is over the hundred."""
        held = self._ratings.test[:limit]
        others = self._ratings.unrated(held[:, 0], CANDIDATES, np.random.default_rng(0))
        items = np.concatenate((held[:, 1:], others), 1)[self._share.mine]
        users = held[self._share.mine, 0]
        total = Score(0, 0, 0.0)
        with torch.inference_mode():
            for part in _parts(len(users)):
                pairs = np.stack((np.repeat(users[part], 1 + CANDIDATES), items[part].ravel()), 1)
                yes = model(torch.from_numpy(pairs))[:, 1].view(-1, 1 + CANDIDATES)
                hits = int(((yes[:, 1:] >= yes[:, :1]).sum(1) < HITS).sum())
                nats = F.cross_entropy(yes, torch.zeros(len(yes), dtype=torch.int64), reduction="sum")
                total += Score(hits, len(yes), float(nats))
        return total


class PixelTask:
    """Which item each pixel of a canvas shows: images of items, composed at random places, and their masks.

    Args:
        images: Of items, grey on black; each worker holds them all and takes its own part.
        share: This worker's, of canvases.
    """

    def __init__(self, images: Images, share: Share) -> None:
        self._images, self._share = images, share

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Canvases ``float32[B, 1, 48, 48]`` and ``int64[B * 48 * 48]``: 0 for the background, else 1 + the class."""
        order, mine = np.random.default_rng(self._share.seed), self._share.mine
        while True:
            canvases, masks = self._canvases(
                order, self._images.train_images, self._images.train_labels, self._share.whole
            )
            yield canvases[mine], masks[mine].flatten()

    def score(self, model: nn.Module, limit: int | None = None) -> Score:
        """Intersection over union of all items' pixels; the cross entropy is over the union.

        Args:
            model: The plain module.
            limit: Ten of these are one canvas of all workers together, for one canvas has as many answers as many
                images.
        """
        count = max((limit or len(self._images.test_images)) // 10, 1)
        order = np.random.default_rng(0)
        canvases, masks = self._canvases(order, self._images.test_images, self._images.test_labels, count)
        canvases, masks = canvases[self._share.mine], masks[self._share.mine]
        total = Score(0, 0, 0.0)
        with torch.inference_mode():
            for part in _parts(len(canvases), 25):
                wanted = masks[part].flatten()
                scores = model(canvases[part])
                answered = scores.argmax(dim=1)
                union = (wanted > 0) | (answered > 0)
                right = int(((answered == wanted) & union).sum())
                nats = F.cross_entropy(scores[union], wanted[union], reduction="sum")
                total += Score(right, int(union.sum()), float(nats))
        return total

    def _canvases(
        self,
        order: np.random.Generator,
        images: npt.NDArray[np.uint8] | Files,
        labels: npt.NDArray[np.int64],
        count: int,
    ) -> tuple[Tensor, Tensor]:
        images = np.asarray(images)[:, 0]
        side = images.shape[-1]
        canvases = np.zeros((count, CANVAS, CANVAS), np.float32)
        masks = np.zeros((count, CANVAS, CANVAS), np.int64)
        chosen = order.integers(0, len(images), (count, ITEMS))
        places = order.integers(0, CANVAS - side + 1, (count, ITEMS, 2))
        for canvas, mask, numbers, corners in zip(canvases, masks, chosen, places, strict=True):
            for number, (top, left) in zip(numbers, corners, strict=True):
                here = np.s_[top : top + side, left : left + side]
                item = images[number] >= INK
                canvas[here][item] = images[number][item] / 255
                mask[here][item] = 1 + labels[number]
        return torch.from_numpy(canvases)[:, None].sub_(0.3).div_(0.35), torch.from_numpy(masks)


def _parts(count: int, size: int = _EVALUATION_BATCH) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))


def _pieces(content: npt.NDArray[np.uint8], begins: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """The pieces that begin at ``begins``, ``int64[B, 64]``, and the byte after each byte, ``int64[B * 64]``."""
    pieces = torch.from_numpy(content[begins[:, None] + np.arange(CONTEXT + 1)].astype(np.int64))
    return pieces[:, :-1].contiguous(), pieces[:, 1:].flatten()


def _score(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> Score:
    total = Score(0, 0, 0.0)
    with torch.inference_mode():
        for inputs, wanted in batches:
            scores = model(inputs)
            nats = F.cross_entropy(scores, wanted, reduction="sum")
            total += Score(int((scores.argmax(dim=1) == wanted).sum()), len(wanted), float(nats))
    return total
