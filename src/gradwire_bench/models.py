"""Two known models in plain torch, for what a step of training takes: with random weights, on random data."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, values: Tensor) -> Tensor:
        """Features of an image."""
        inner = functional.relu(self.bn1(self.conv1(values)))
        inner = functional.relu(self.bn2(self.conv2(inner)))
        return functional.relu(self.bn3(self.conv3(inner)) + self.downsample(values))


class ResNet50(nn.Module):
    """ResNet-50 for 1 000 classes (He et al. 2015, arXiv 1512.03385), 25 557 032 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        blocks: list[nn.Module] = []
        inputs = 64
        for layer, (count, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
            for block in range(count):
                blocks.append(Bottleneck(inputs, width, 2 if layer and not block else 1))
                inputs = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(inputs, 1000)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """The loss of ``float[n, 3, 224, 224]``."""
        values = functional.max_pool2d(functional.relu(self.bn1(self.conv1(images))), 3, 2, 1)
        features = self.blocks(values).mean((2, 3))
        return functional.cross_entropy(self.fc(features), classes)


class GPT2(nn.Module):
    """GPT-2 small (Radford et al. 2019): 12 layers of 768, 124 439 808 parameters."""

    def __init__(self, vocabulary: int = 50_257, context: int = 1024, width: int = 768, layers: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def scores(self, tokens: Tensor) -> Tensor:
        """Of every token that may follow each of ``int64[n, length]``."""
        length = tokens.shape[1]
        values = self.words(tokens) + self.places.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device, dtype=values.dtype)
        for layer in self.layers:
            values = layer(values, src_mask=mask, is_causal=True)
        return functional.linear(self.norm(values), self.words.weight)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        """The loss of ``int64[n, length]``."""
        return functional.cross_entropy(self.scores(tokens).flatten(0, 1).float(), following.flatten())


def resnet50_batch(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random images and classes."""
    return torch.randn(count, 3, 224, 224, device=device), torch.randint(1000, (count,), device=device)


def gpt2_batch(count: int, device: torch.device, length: int = 1024) -> tuple[Tensor, Tensor]:
    """Random tokens and those that follow."""
    tokens = torch.randint(50_257, (count, length + 1), device=device)
    return tokens[:, :-1], tokens[:, 1:]
