"""Classifiers of small images."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10


class ConvNet(nn.Sequential):
    """Two convolutions and two dense layers for 28 by 28 images: 1.23 M parameters, 98 % of them in one matrix.

    The shape of LeNet and of VGG in small, with batch normalisation: few operations for each parameter, so the network
    is what limits data-parallel training, as it is for large models on many machines.

    Args:
        channels: Of the first convolution; the second has twice as many.
        hidden: Units of the layer before the last.
        colours: Channels of an image.
        classes: Of images.
    """

    def __init__(self, channels: int = 32, hidden: int = 384, *, colours: int = 1, classes: int = CLASSES) -> None:
        super().__init__(
            nn.Conv2d(colours, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * channels * 7**2, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )


class ResNet20(nn.Sequential):
    """Three stages of three basic blocks (He et al. 2015, arXiv 1512.03385, section 4.2), for 32 by 32 images.

    0.27 M parameters at its defaults.

    Args:
        width: Channels of the first stage; each stage has twice as many as the one before.
        colours: Channels of an image.
        classes: Of images.
    """

    def __init__(self, width: int = 16, *, colours: int = 1, classes: int = CLASSES) -> None:
        stages: list[nn.Module] = []
        inputs = width
        for stage in range(3):
            for block in range(3):
                outputs = width << stage
                stages.append(_Basic(inputs, outputs, stride=2 if stage and not block else 1))
                inputs = outputs
        super().__init__(
            _convolution(colours, width), *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)
        )


class ResNet9(nn.Sequential):
    """Eight convolutions, two shortcuts and a dense layer: the net of the DAWNBench entries, for 32 by 32 images.

    6.6 M parameters at its defaults.

    Args:
        width: Channels of the first convolution; each of the three stages has twice as many as what went before.
        stride: Of the first convolution; 2 makes it a net of a quarter of the work.
        colours: Channels of an image.
        classes: Of images.
    """

    def __init__(self, width: int = 64, stride: int = 1, *, colours: int = 1, classes: int = CLASSES) -> None:
        super().__init__(
            _convolution(colours, width, stride),
            _convolution(width, 2 * width),
            nn.MaxPool2d(2),
            _Twice(2 * width),
            _convolution(2 * width, 4 * width),
            nn.MaxPool2d(2),
            _convolution(4 * width, 8 * width),
            nn.MaxPool2d(2),
            _Twice(8 * width),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            nn.Linear(8 * width, classes),
        )


class VGG16(nn.Sequential):
    """Thirteen convolutions (Simonyan and Zisserman 2014, arXiv 1409.1556, configuration D), for 32 by 32 images.

    With batch normalisation, and one dense layer instead of three, as is usual for images of this size. 14.7 M
    parameters at its defaults.

    Args:
        width: Channels of the first two convolutions.
        colours: Channels of an image.
        classes: Of images.
    """

    def __init__(self, width: int = 64, *, colours: int = 1, classes: int = CLASSES) -> None:
        layers: list[nn.Module] = []
        inputs = colours
        for outputs, count in zip((width, 2 * width, 4 * width, 8 * width, 8 * width), (2, 2, 3, 3, 3), strict=True):
            for _ in range(count):
                layers.append(_convolution(inputs, outputs))
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        super().__init__(*layers, nn.Flatten(), nn.Linear(inputs, classes))


class AlexNet(nn.Sequential):
    """Five convolutions and three dense layers (Krizhevsky et al. 2012), as used on 32 by 32 images.

    Without normalisation, and begun as He et al. (2015, arXiv 1502.01852) have it; 4.4 M parameters at its defaults.

    Args:
        width: Channels of the first convolution.
        hidden: Units of the dense layers.
        colours: Channels of an image.
        classes: Of images.
    """

    def __init__(self, width: int = 64, hidden: int = 1024, *, colours: int = 1, classes: int = CLASSES) -> None:
        super().__init__(
            nn.Conv2d(colours, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 3 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(3 * width, 6 * width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(6 * width, 4 * width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(4 * width, 4 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * width * 2 * 2, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )
        for each in self:
            if isinstance(each, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(each.weight, nonlinearity="relu")
                if each.bias is not None:
                    nn.init.zeros_(each.bias)


class _Basic(nn.Module):
    """Two convolutions around a shortcut, which takes every second pixel and new channels of zeros (option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self._stride, self._new = stride, outputs - inputs

    def forward(self, values: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(values)))))
        shortcut = F.pad(values[:, :, :: self._stride, :: self._stride], (0, 0, 0, 0, 0, self._new))
        return F.relu(inner + shortcut)


class _Twice(nn.Module):
    """Two convolutions and what went in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(_convolution(width, width), _convolution(width, width))

    def forward(self, values: Tensor) -> Tensor:
        after: Tensor = values + self.inner(values)
        return after


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )
