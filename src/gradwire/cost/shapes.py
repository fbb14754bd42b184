"""Shapes of known models' parameters, in the order of their definition, and of a user's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from gradwire.errors import ConfigurationError, did_you_mean

Shape = tuple[int, ...]
NamedShape = tuple[str, Shape]


@dataclass(frozen=True)
class Model:
    """A model's parameters.

    Attributes:
        name: Its name.
        parameters: Names and shapes in definition order.
        source: Where the shapes are from.
        pace: How a backward pass divides its time: in proportion to values, as where every weight is used once for
            each position; or alike among matrices and filters, as in networks of convolutions whose blocks are made to
            take the same time while images become smaller and filters more.
        dtype: Of the gradients as DDP would send them.
    """

    name: str
    parameters: tuple[NamedShape, ...]
    source: str
    pace: Literal["value", "layer"] = "value"
    dtype: torch.dtype = torch.float32

    def work(self, name: str, shape: Shape) -> float:
        """A parameter's share of a backward pass, relative to the others'; none for tables that are looked up."""
        if self.pace == "layer":
            return float(len(shape) > 1)
        return 0.0 if "embed" in name and len(shape) == 2 else float(math.prod(shape))

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return numel(self.parameters)


def get(name: str) -> Model:
    """A known model.

    Raises:
        ConfigurationError: If there is none of this name.
    """
    if name not in _KNOWN:
        raise ConfigurationError(
            f"shapes={name!r} is not known; {did_you_mean(name, _KNOWN)}choose one of {', '.join(_KNOWN)}, or the "
            "function of your own that makes a model, as in 'train.py:make_model'"
        )
    make, source, pace = _KNOWN[name]
    return Model(name, tuple(make()), source, pace)


def names() -> tuple[str, ...]:
    """The models that are known."""
    return tuple(_KNOWN)


def numel(parameters: Sequence[NamedShape]) -> int:
    """Number of values."""
    return sum(math.prod(shape) for _, shape in parameters)


THROUGHPUT: dict[tuple[str, str], float] = {
    ("resnet50", "v100-fp32"): 367,
    ("resnet50", "v100-amp"): 1200,
    ("resnet50", "a100-tf32"): 938,
    ("resnet50", "a100-amp"): 2470,
}
"""Images a second on one GPU, as NVIDIA publishes them for its DeepLearningExamples (PyTorch, ResNet-50 v1.5, container
21.03, DGX-1 16 GB and DGX A100 80 GB)."""


def _tiny() -> Iterator[NamedShape]:
    yield "conv.weight", (32, 16, 3, 3)
    yield "conv.bias", (32,)
    yield "hidden.weight", (256, 288)
    yield "hidden.bias", (256,)
    yield "head.weight", (10, 256)
    yield "head.bias", (10,)


def _linear(name: str, outputs: int, inputs: int) -> Iterator[NamedShape]:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def _norm(name: str, width: int) -> Iterator[NamedShape]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _resnet(blocks: Sequence[int]) -> Iterator[NamedShape]:
    yield "conv1.weight", (64, 3, 7, 7)
    yield from _norm("bn1", 64)
    inputs = 64
    for layer, (count, width) in enumerate(zip(blocks, (64, 128, 256, 512), strict=True), start=1):
        outputs = 4 * width
        for block in range(count):
            prefix = f"layer{layer}.{block}"
            kernels = ((width, inputs, 1, 1), (width, width, 3, 3), (outputs, width, 1, 1))
            for index, kernel in enumerate(kernels, start=1):
                yield f"{prefix}.conv{index}.weight", kernel
                yield from _norm(f"{prefix}.bn{index}", kernel[0])
            if block == 0:
                yield f"{prefix}.downsample.0.weight", (outputs, inputs, 1, 1)
                yield from _norm(f"{prefix}.downsample.1", outputs)
            inputs = outputs
    yield from _linear("fc", 1000, 2048)


def _resnet18() -> Iterator[NamedShape]:
    yield "conv1.weight", (64, 3, 7, 7)
    yield from _norm("bn1", 64)
    inputs = 64
    for layer, width in enumerate((64, 128, 256, 512), start=1):
        for block in range(2):
            prefix = f"layer{layer}.{block}"
            for index, channels in enumerate((inputs, width), start=1):
                yield f"{prefix}.conv{index}.weight", (width, channels, 3, 3)
                yield from _norm(f"{prefix}.bn{index}", width)
            if inputs != width:
                yield f"{prefix}.downsample.0.weight", (width, inputs, 1, 1)
                yield from _norm(f"{prefix}.downsample.1", width)
            inputs = width
    yield from _linear("fc", 1000, 512)


def _vgg16() -> Iterator[NamedShape]:
    inputs = 3
    for index, outputs in enumerate((64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)):
        yield f"features.{index}.weight", (outputs, inputs, 3, 3)
        yield f"features.{index}.bias", (outputs,)
        inputs = outputs
    yield from _linear("classifier.0", 4096, 512 * 7 * 7)
    yield from _linear("classifier.3", 4096, 4096)
    yield from _linear("classifier.6", 1000, 4096)


def _bert(layers: int, width: int) -> Iterator[NamedShape]:
    yield "embeddings.word_embeddings.weight", (30522, width)
    yield "embeddings.position_embeddings.weight", (512, width)
    yield "embeddings.token_type_embeddings.weight", (2, width)
    yield from _norm("embeddings.norm", width)
    for layer in range(layers):
        prefix = f"encoder.{layer}"
        for part in ("query", "key", "value", "output"):
            yield from _linear(f"{prefix}.attention.{part}", width, width)
        yield from _norm(f"{prefix}.attention.norm", width)
        yield from _linear(f"{prefix}.intermediate", 4 * width, width)
        yield from _linear(f"{prefix}.output", width, 4 * width)
        yield from _norm(f"{prefix}.norm", width)
    yield from _linear("pooler", width, width)


def _gpt2() -> Iterator[NamedShape]:
    width = 768
    yield "wte.embedding", (50257, width)
    yield "wpe.embedding", (1024, width)
    for layer in range(12):
        prefix = f"h.{layer}"
        yield from _norm(f"{prefix}.ln_1", width)
        yield f"{prefix}.attn.c_attn.weight", (width, 3 * width)
        yield f"{prefix}.attn.c_attn.bias", (3 * width,)
        yield from _linear(f"{prefix}.attn.c_proj", width, width)
        yield from _norm(f"{prefix}.ln_2", width)
        yield f"{prefix}.mlp.c_fc.weight", (width, 4 * width)
        yield f"{prefix}.mlp.c_fc.bias", (4 * width,)
        yield f"{prefix}.mlp.c_proj.weight", (4 * width, width)
        yield f"{prefix}.mlp.c_proj.bias", (width,)
    yield from _norm("ln_f", width)


def _lstm() -> Iterator[NamedShape]:
    width, words = 1500, 10000
    yield "encoder.embedding", (words, width)
    for layer in range(2):
        for part in ("ih", "hh"):
            yield f"rnn.weight_{part}_l{layer}", (4 * width, width)
        for part in ("ih", "hh"):
            yield f"rnn.bias_{part}_l{layer}", (4 * width,)
    yield from _linear("decoder", words, width)


def _ncf() -> Iterator[NamedShape]:
    users, items = 138493, 26744
    yield "mf_user_embed.weight", (users, 64)
    yield "mf_item_embed.weight", (items, 64)
    yield "mlp_user_embed.weight", (users, 128)
    yield "mlp_item_embed.weight", (items, 128)
    inputs = 256
    for index, outputs in enumerate((256, 128, 64)):
        yield from _linear(f"mlp.{index}", outputs, inputs)
        inputs = outputs
    yield from _linear("final", 1, 128)


_Made = tuple[Callable[[], Iterator[NamedShape]], str, Literal["value", "layer"]]
_KNOWN: dict[str, _Made] = {
    "tiny": (_tiny, "made up, 0.1 M parameters, for a first look", "value"),
    "resnet18": (_resnet18, "He et al. 2015, arXiv:1512.03385", "layer"),
    "resnet50": (lambda: _resnet((3, 4, 6, 3)), "He et al. 2015, arXiv:1512.03385", "layer"),
    "resnet152": (lambda: _resnet((3, 8, 36, 3)), "He et al. 2015, arXiv:1512.03385", "layer"),
    "vgg16": (_vgg16, "Simonyan & Zisserman 2014, arXiv:1409.1556, configuration D", "layer"),
    "bert-base": (lambda: _bert(12, 768), "Devlin et al. 2018, arXiv:1810.04805", "value"),
    "bert-large": (lambda: _bert(24, 1024), "Devlin et al. 2018, arXiv:1810.04805", "value"),
    "gpt2": (_gpt2, "Radford et al. 2019, the smallest, with one table for words in and out", "value"),
    "lstm": (_lstm, "Zaremba et al. 2014, arXiv:1409.2329, the large one for Penn Treebank", "value"),
    "ncf": (_ncf, "He et al. 2017, arXiv:1708.05031, sized as MLPerf 0.5 for MovieLens-20M", "value"),
}
