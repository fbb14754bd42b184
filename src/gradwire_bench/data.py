"""Real images for the benchmarks: Fashion-MNIST where it can be had, else scikit-learn's digits; CIFAR-10; folders."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gradwire.errors import ConfigurationError
from gradwire_bench import folders, origin
from gradwire_bench.folders import Files

FASHION_MNIST = "Fashion-MNIST"
DIGITS = "scikit-learn digits"
DEBIAN_PACKAGE = "dataset-fashion-mnist"
SYSTEM_DIRECTORY = Path("/usr/share/datasets/fashion-mnist")
APT_TIMEOUT = 120.0
"""Seconds one apt-get call may take."""

CIFAR10 = "CIFAR-10"
CIFAR10_ARCHIVE = "cifar-10-binary.tar.gz"

IMAGENET = "ImageNet"

Dataset = Literal["auto", "fashion-mnist", "digits", "cifar10", "imagenet"]

_FILES = {
    "train_images": "train-images-idx3-ubyte.gz",
    "train_labels": "train-labels-idx1-ubyte.gz",
    "test_images": "t10k-images-idx3-ubyte.gz",
    "test_labels": "t10k-labels-idx1-ubyte.gz",
}
_SHA256 = {
    "train_images": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train_labels": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "test_images": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "test_labels": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
"""Of what is in the compressed files, which differ between those who pack them."""

_CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
"""Of the archive, as its authors publish it."""
_CIFAR10_TRAIN, _CIFAR10_TEST = tuple(f"data_batch_{number}.bin" for number in range(1, 6)), ("test_batch.bin",)
_COLOUR_SIDE = 32

_DIGITS_TRAIN = 1_437  # four fifths of the 1 797


@dataclass(frozen=True)
class DataSource:
    """Which images a benchmark uses, and why these.

    Attributes:
        name: The data set's name.
        directory: Where its files lie; ``None`` for data that ships inside a library.
        reason: One sentence for the reader.
        colours: Channels of its images.
        classes: What they show.
    """

    name: str
    directory: Path | None
    reason: str
    colours: int = 1
    classes: int = 10

    def plain(self) -> dict[str, Any]:
        """For a JSON."""
        return {**asdict(self), "directory": None if self.directory is None else str(self.directory)}

    @classmethod
    def of(cls, content: dict[str, Any]) -> DataSource:
        """From a JSON."""
        return cls(**{**content, "directory": Path(content["directory"]) if content["directory"] else None})


@dataclass(frozen=True, eq=False)
class Images:
    """A labelled image set, in memory or in files that are decoded as they are asked for.

    Attributes:
        name: The data set's name.
        train_images: ``uint8[N, C, H, W]``, 0 to 255.
        train_labels: ``int64[N]``, from 0.
        test_images: ``uint8[M, C, H, W]``.
        test_labels: ``int64[M]``.
    """

    name: str
    train_images: npt.NDArray[np.uint8] | Files
    train_labels: npt.NDArray[np.int64]
    test_images: npt.NDArray[np.uint8] | Files
    test_labels: npt.NDArray[np.int64]


def cache_directory() -> Path:
    """Where downloaded data is kept: ``$GRADWIRE_CACHE``, else ``gradwire`` in the user's cache directory."""
    if chosen := os.environ.get("GRADWIRE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradwire"


def find_fashion_mnist() -> Path | None:
    """The directory that holds the four files of Fashion-MNIST on this machine, or ``None``."""
    for directory in (SYSTEM_DIRECTORY, cache_directory() / "fashion-mnist"):
        if all((directory / file).is_file() for file in _FILES.values()):
            return directory
    return None


def locate(dataset: Dataset = "auto") -> DataSource:
    """Finds the images to use, downloading Fashion-MNIST (31 MB) where apt-get exists.

    Args:
        dataset: ``"auto"`` falls back to digits when Fashion-MNIST cannot be had, and says why.

    Raises:
        ConfigurationError: If Fashion-MNIST was asked for by name and cannot be had.
    """
    if dataset == "digits":
        return DataSource(DIGITS, None, "asked for")
    if dataset == "cifar10":
        return _locate_cifar10()
    if dataset == "imagenet":
        own = cache_directory() / "imagenet"
        return DataSource(IMAGENET, own, f"found in {own}", 3, len(folders.classes(own)))
    if directory := find_fashion_mnist():
        return DataSource(FASHION_MNIST, directory, f"found in {directory}")
    try:
        directory = _download_fashion_mnist()
    except (OSError, subprocess.SubprocessError) as error:
        why = f"Fashion-MNIST is not on this machine and cannot be downloaded: {_first_line(error)}"
        if dataset == "fashion-mnist":
            raise ConfigurationError(
                f"{why}; put its four .gz files into {cache_directory() / 'fashion-mnist'} or use --dataset digits"
            ) from error
        return DataSource(DIGITS, None, why)
    return DataSource(FASHION_MNIST, directory, f"downloaded into {directory}")


def load(source: DataSource) -> Images:
    """Reads all images of a source into memory.

    Raises:
        ConfigurationError: If a file is damaged, or not the known one.
    """
    if source.directory is None:
        return _load_digits()
    if source.name == CIFAR10:
        return load_cifar10(source.directory / CIFAR10_ARCHIVE)
    if source.name == IMAGENET:
        known = folders.classes(source.directory)
        train, test = (folders.read(source.directory, part, known) for part in folders.PARTS)
        return Images(IMAGENET, *train, *test)
    arrays = {field: _read_idx(source.directory / file, _SHA256[field]) for field, file in _FILES.items()}
    return Images(
        FASHION_MNIST,
        arrays["train_images"][:, None],
        arrays["train_labels"].astype(np.int64),
        arrays["test_images"][:, None],
        arrays["test_labels"].astype(np.int64),
    )


def _load_digits() -> Images:
    origin.require("sklearn")
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = np.rint(pixels.reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:_DIGITS_TRAIN], order[_DIGITS_TRAIN:]
    labels = labels.astype(np.int64)
    return Images(DIGITS, images[train], labels[train], images[test], labels[test])


def load_cifar10(archive: Path, md5: str = _CIFAR10_MD5) -> Images:
    """Reads the archive of CIFAR-10's binary version.

    Args:
        archive: ``cifar-10-binary.tar.gz``; its records are a label and 32 by 32 values of red, of green and of blue.
        md5: What the archive must have.

    Raises:
        ConfigurationError: If the archive is another one, or a file in it has no whole records.
    """
    found = hashlib.md5(archive.read_bytes(), usedforsecurity=False).hexdigest()
    if found != md5:
        raise ConfigurationError(f"{archive} has the MD5 {found}, not {md5}: remove it and get it again")
    with tarfile.open(archive) as opened:
        contents = {
            Path(member.name).name: file.read()
            for member in opened.getmembers()
            if (file := opened.extractfile(member)) is not None
        }
    train, test = (_read_records(archive, contents, names) for names in (_CIFAR10_TRAIN, _CIFAR10_TEST))
    return Images(CIFAR10, *train, *test)


def _read_records(
    archive: Path, contents: dict[str, bytes], names: tuple[str, ...]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    if missing := [name for name in names if name not in contents]:
        raise ConfigurationError(f"{archive} lacks {', '.join(missing)}; take the binary version of CIFAR-10")
    content = np.frombuffer(b"".join(contents[name] for name in names), np.uint8)
    record = 1 + 3 * _COLOUR_SIDE**2
    if len(content) % record:
        raise ConfigurationError(f"{archive}: {len(content)} bytes are no whole records of {record}; get it again")
    records = content.reshape(-1, record)
    return records[:, 1:].reshape(-1, 3, _COLOUR_SIDE, _COLOUR_SIDE), records[:, 0].astype(np.int64)


def _locate_cifar10() -> DataSource:
    directory = cache_directory() / "cifar-10"
    if not (directory / CIFAR10_ARCHIVE).is_file():
        raise ConfigurationError(
            f"{CIFAR10} is not in {directory}: put https://www.cs.toronto.edu/~kriz/{CIFAR10_ARCHIVE} (170 MB) there, "
            "or use --dataset fashion-mnist"
        )
    return DataSource(CIFAR10, directory, f"found in {directory}", 3)


def _read_idx(path: Path, sha256: str) -> npt.NDArray[np.uint8]:
    """Reads one gzipped IDX file of unsigned bytes: magic 0, 0, 8, rank; then big-endian sizes; then the bytes."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigurationError(f"{path} cannot be unpacked: {error}; remove it and run again") from error
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise ConfigurationError(f"{path} holds what has the SHA-256 {found}, not {sha256}: remove it and run again")
    if content[:3] != b"\0\0\x08":
        raise ConfigurationError(f"{path} is not an IDX file of unsigned bytes; remove it and run again")
    rank = content[3]
    sizes = np.frombuffer(content, dtype=">u4", count=rank, offset=4)
    return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * rank).reshape(sizes)


def _download_fashion_mnist() -> Path:
    """Takes the Debian package apart in the cache directory; needs no root."""
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise FileNotFoundError("apt-get and dpkg are not on this machine")
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / "fashion-mnist"
    with tempfile.TemporaryDirectory(dir=cache, prefix="download-") as work:
        try:
            _run(["apt-get", "download", DEBIAN_PACKAGE], work)
        except subprocess.CalledProcessError:
            _run(["apt-get", "update"], work)
            _run(["apt-get", "download", DEBIAN_PACKAGE], work)
        (package,) = Path(work).glob(f"{DEBIAN_PACKAGE}_*.deb")
        _run(["dpkg", "-x", str(package), work], work)
        target.mkdir(exist_ok=True)
        for file in _FILES.values():
            (Path(work) / SYSTEM_DIRECTORY.relative_to("/") / file).replace(target / file)
    return target


def _run(command: list[str], directory: str) -> None:
    subprocess.run(
        command,
        cwd=directory,
        check=True,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=APT_TIMEOUT,
    )


def _first_line(error: Exception) -> str:
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
    return (said or str(error)).strip().splitlines()[0]
