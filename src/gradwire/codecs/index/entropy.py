"""Coordinates as entropy-coded gaps, in a size that depends on how they clump."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.index.coding import IndexCoding
from gradwire.errors import ConfigurationError, PayloadError
from gradwire.kernels.reference import elias_fano_bytes, gaps_low_bytes

_HEAD = 12
"""Bytes before what is coded: three uint32."""

_LEVEL = 1
"""Of Zstandard: of higher ones, searching longer for matches among random classes, results are longer too."""

_WINDOW_BITS = 19
"""Of Zstandard: as many bytes at a time, so that a decoder needs no more memory than that beside its result."""


@dataclass(frozen=True)
class Entropy(IndexCoding):
    """Gaps between coordinates, coded by how often each size of gap comes up (Zstandard, RFC 8878).

    A gap of ``b`` bits is a class, which says ``b`` and the bit after the highest one, and the other ``b - 2`` bits as
    they are. Classes are coded by Zstandard, whose Huffman codes follow their frequencies. Where that is not shorter
    than Elias-Fano coding, that is written instead; so there are at most 12 bytes more.

    A random 1 % of coordinates takes 8.1 bits each, against 8.6 in Elias-Fano and an entropy of 8.08, which hardly
    pays. Large gradients are not at random places: the largest 1 % of those of a small CNN, 30 steps into its training,
    take 6.1 to 6.5 bits each if chosen by layer and 5.2 to 5.4 if from the whole model. Below some hundred coordinates
    tables outweigh the gain.

    It takes four to seven times as long as Elias-Fano coding, which is still a small part of choosing coordinates, and
    needs ``pip install gradwire[entropy]``. What is read does not depend on that library's version.

    A payload is three uint32, little-endian: how many bytes, these 12 included, all coordinates would have taken; how
    many coordinates were written, from the first one on; and in how many bytes their classes are, 0 for Elias-Fano
    coding. Then come the classes, zeros up to a multiple of 4 bytes, the low bits of all gaps, lowest first, and zeros.
    """

    varies: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _zstandard()

    def size(self, count: int, universe: int) -> int:
        """The most there can be: Elias-Fano, and what says so."""
        return _HEAD + elias_fano_bytes(count, universe)

    def bound(self, count: int, universe: int) -> int:
        """One word more, as for Elias-Fano."""
        return self.size(count, universe) + 4

    def encode(self, positions: Tensor, universe: int, payload: Tensor) -> int:
        """Writes the first positions, as many as there is room for."""
        fitted, room = positions.numel(), payload.numel() - _HEAD
        content, class_bytes = _coded(positions, universe)
        wanted = _HEAD + content.numel()
        while content.numel() > room:
            fitted = min(fitted - 1, fitted * room // content.numel())
            content, class_bytes = _coded(positions[:fitted], universe)
        payload[:_HEAD].view(torch.int32).copy_(torch.tensor([wanted, fitted, class_bytes]))
        payload[_HEAD : _HEAD + content.numel()] = content
        payload[_HEAD + content.numel() :] = 0
        return fitted

    def decode(self, payload: Tensor, universe: int, positions: Tensor) -> int:
        """Reads as many as were written."""
        wanted, fitted, class_bytes = payload[:_HEAD].clone().view(torch.int32).tolist()
        most = self.size(positions.numel(), universe)
        if not (_HEAD <= wanted <= most and 0 <= fitted <= positions.numel()):
            raise PayloadError(
                f"a payload says that it has {fitted} positions of up to {positions.numel()}, and wanted {wanted} "
                f"bytes of up to {most}"
            )
        if fitted < positions.numel() and wanted <= payload.numel():
            raise PayloadError(f"{fitted} of {positions.numel()} positions were written where there was room for all")
        content = payload[_HEAD:]
        if not class_bytes:
            size = elias_fano_bytes(fitted, universe)
            if size > content.numel():
                raise PayloadError(f"{fitted} positions take {size} bytes, and there are {content.numel()}")
            kernels.elias_fano_decode(content[:size], universe, positions[:fitted])
            return int(fitted)
        edge = -(-class_bytes // 4) * 4
        if not 0 < edge <= content.numel():
            raise PayloadError(f"classes take {class_bytes} bytes, and there are {content.numel()}")
        classes = _decompressed(content[:class_bytes], fitted).to(positions.device)
        kernels.gaps_decode(classes, content[edge:], universe, positions[:fitted])
        return int(fitted)

    def wanted(self, payload: Tensor, count: int, universe: int) -> float:
        """What all would have taken, as a share of what the most can be."""
        least, most = self.size(0, universe), self.size(count, universe)
        wanted = int(payload[:4].clone().view(torch.int32))
        return (wanted - least) / (most - least) if most > least else 0.0


def _coded(positions: Tensor, universe: int) -> tuple[Tensor, int]:
    """What follows the head, and in how many bytes the classes are."""
    count = positions.numel()
    most = elias_fano_bytes(count, universe)
    classes = torch.empty(count, dtype=torch.uint8, device=positions.device)
    low = torch.empty(gaps_low_bytes(count, universe), dtype=torch.uint8, device=positions.device)
    low_bytes = kernels.gaps_encode(positions, universe, classes, low)
    if low_bytes < most:
        compressed = _compressed(classes)
        edge = -(-len(compressed) // 4) * 4
        if edge + low_bytes < most:
            content = torch.zeros(edge + low_bytes, dtype=torch.uint8)
            content[: len(compressed)] = torch.frombuffer(bytearray(compressed), dtype=torch.uint8)
            content[edge:] = low[:low_bytes]
            return content.to(positions.device), len(compressed)
    content = torch.empty(most, dtype=torch.uint8, device=positions.device)
    kernels.elias_fano_encode(positions, universe, content)
    return content, 0


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigurationError(
            "indices='entropy' needs the zstandard library: pip install gradwire[entropy], or choose 'elias-fano'"
        ) from error
    return zstandard


def _compressed(classes: Tensor) -> bytes:
    """A frame of Zstandard, without its magic number."""
    library = _zstandard()
    parameters = library.ZstdCompressionParameters.from_level(
        _LEVEL, window_log=_WINDOW_BITS, format=library.FORMAT_ZSTD1_MAGICLESS
    )
    compressed: bytes = library.ZstdCompressor(compression_params=parameters).compress(classes.cpu().numpy())
    return compressed


def _decompressed(frame: Tensor, count: int) -> Tensor:
    """The classes in a frame.

    Raises:
        PayloadError: Unless it says that it has ``count``, and has; no memory is taken for more.
    """
    library = _zstandard()
    written = library.FRAME_HEADER + frame.cpu().numpy().tobytes()  # before 0.24 it does not read frames without
    try:
        said = library.get_frame_parameters(written)
        if said.content_size != count or said.has_checksum or said.dict_id:
            raise PayloadError(f"classes are a frame of {said.content_size} bytes, and not of {count}")
        decompressor = library.ZstdDecompressor(max_window_size=1 << _WINDOW_BITS)
        classes = decompressor.decompress(written, max_output_size=count, allow_extra_data=False)
    except library.ZstdError as error:
        raise PayloadError(f"classes are not a frame of Zstandard: {error}") from error
    if len(classes) != count:
        raise PayloadError(f"a frame has {len(classes)} classes, and not {count}")
    return torch.from_numpy(np.frombuffer(classes, dtype=np.uint8).copy())
