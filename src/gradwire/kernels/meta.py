"""The kernels of torch's meta device, whose tensors have sizes only: they do nothing, and say what they cannot know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire.kernels import codes
from gradwire.kernels.dispatch import KERNELS

ANSWERS = {
    "None": None,
    "Flag": torch.empty((), dtype=torch.bool, device="meta"),
    "Count": torch.empty((), dtype=torch.int64, device="meta"),
}
"""What kernels may return, by annotation."""

CODES = codes.ALL


def _nothing(name: str, returns: str) -> Callable[..., Any]:
    def kernel(*arguments: Any, **options: Any) -> Tensor | None:
        if returns not in ANSWERS:
            raise NotImplementedError(f"{name} reads values, which tensors on the meta device do not have")
        return ANSWERS[returns]

    return kernel


globals().update(
    {name: _nothing(name, str(reference.__annotations__["return"])) for name, reference in KERNELS.items()}
)
