"""Images in folders, one a class, as ImageNet's users keep them: decoded as they are asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from gradwire.errors import ConfigurationError

PARTS = ("train", "val")
SIDE = 64
"""Of an image as it is decoded, as in the smaller ImageNet of Chrabaszcz et al. (2017, arXiv 1707.08819)."""

_KINDS = frozenset((".jpeg", ".jpg", ".png"))
_SAMPLE = 256
"""Images whose brightness stands for that of all."""


class Files:
    """Images in files; ``numpy.asarray`` of some of them decodes these: ``uint8[N, 3, 64, 64]``.

    Args:
        paths: Theirs.
    """

    def __init__(self, paths: npt.NDArray[np.str_]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, which: slice | npt.NDArray[np.int64]) -> Files:
        return Files(self._paths[which])

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[np.uint8]:
        return np.stack([_decoded(Path(path)) for path in self._paths])

    def mean(self) -> float:
        """Brightness of some of them, 0 to 255."""
        return float(np.asarray(self._sample()).mean())

    def std(self) -> float:
        """Its deviation."""
        return float(np.asarray(self._sample()).std())

    def _sample(self) -> Files:
        return self[:: max(len(self) // _SAMPLE, 1)]


def classes(directory: Path) -> list[str]:
    """Names of the folders, which both parts must have.

    Raises:
        ConfigurationError: If they do not, or have none.
    """
    train, val = (
        sorted(each.name for each in (directory / part).glob("*/")) if (directory / part).is_dir() else []
        for part in PARTS
    )
    if not train or train != val:
        odd = sorted({*train} ^ {*val})
        missing = f"; only one of them has {odd[0]}" if train and val else ""
        raise ConfigurationError(
            f"{directory} needs train and val, each with a folder a class and images in it{missing}: unpack ImageNet "
            "(https://image-net.org, or any images of yours) there, or link to where it lies"
        )
    return train


def read(directory: Path, part: str, known: list[str]) -> tuple[Files, npt.NDArray[np.int64]]:
    """The images of a part and their classes, by number.

    Raises:
        ConfigurationError: If a class has none.
    """
    paths: list[str] = []
    labels: list[int] = []
    for number, name in enumerate(known):
        own = sorted(str(each) for each in (directory / part / name).iterdir() if each.suffix.lower() in _KINDS)
        if not own:
            raise ConfigurationError(f"{directory / part / name} has no image, .jpeg or .png; get it again")
        paths += own
        labels += [number] * len(own)
    return Files(np.array(paths)), np.array(labels, np.int64)


def _decoded(path: Path) -> npt.NDArray[np.uint8]:
    """The middle square, in colours, ``uint8[3, 64, 64]``."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            square = ImageOps.fit(image.convert("RGB"), (SIDE, SIDE), Image.Resampling.BOX)
    except (OSError, UnidentifiedImageError) as error:
        raise ConfigurationError(f"{path} is no image that can be read: {error}; get it again") from error
    return np.asarray(square, np.uint8).transpose(2, 0, 1)
