"""What each pixel belongs to."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UNet(nn.Module):
    """Down and up again, with what was seen on the way down (Ronneberger et al. 2015, arXiv 1505.04597), in small.

    Padded convolutions with batch normalisation; 0.47 M parameters at its defaults.

    Args:
        classes: The background included.
        width: Channels at full size; twice as many at each of the two smaller sizes.
    """

    def __init__(self, classes: int = 11, width: int = 32) -> None:
        super().__init__()
        self.down1, self.down2 = _double(1, width), _double(width, 2 * width)
        self.bottom = _double(2 * width, 4 * width)
        self.lift2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up2 = _double(4 * width, 2 * width)
        self.lift1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.up1 = _double(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Scores ``float32[B * H * W, classes]`` of each pixel of ``float32[B, 1, H, W]``."""
        first = self.down1(images)
        second = self.down2(F.max_pool2d(first, 2))
        third = self.bottom(F.max_pool2d(second, 2))
        second = self.up2(torch.cat((self.lift2(third), second), 1))
        first = self.up1(torch.cat((self.lift1(second), first), 1))
        scores: Tensor = self.head(first)
        return scores.permute(0, 2, 3, 1).flatten(0, 2)


def _double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )
