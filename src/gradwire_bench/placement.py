"""What trains, where it computes, and what its workers' collectives go through."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from gradwire.errors import ConfigurationError

Framework = Literal["torch", "keras-tf", "keras-jax", "jax"]
Device = Literal["cpu", "cuda"]
Backend = Literal["gloo", "nccl"]

BACKENDS: dict[Backend, str] = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
"""As torch is told; the benchmarks' own small messages stay on the processor."""


def check(device: Device, backend: Backend = "gloo", workers: int = 1) -> None:
    """Raises ConfigurationError if a training cannot compute there, or its workers cannot talk that way."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            "device='cuda', but torch sees no GPU here (gradwire doctor says why); choose device 'cpu'"
        )
    if backend == "nccl" and device != "cuda":
        raise ConfigurationError(f"backend='nccl' is for device 'cuda', not {device!r}; choose 'gloo' or that device")
    if backend == "nccl" and workers > torch.cuda.device_count():
        raise ConfigurationError(
            f"workers={workers} is more than {torch.cuda.device_count()}, the GPUs here, of which backend 'nccl' takes "
            "one a worker; choose fewer workers or backend 'gloo'"
        )


def place(device: Device, rank: int = 0) -> torch.device:
    """A worker's device; several share a GPU where there are more of them."""
    if device == "cpu":
        return torch.device("cpu")
    own = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(own)
    return own


def wait(device: torch.device) -> None:
    """Until a device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class FromHost(nn.Module):
    """A model that is given samples, and asked for answers, in the host's memory.

    Args:
        net: The model.
        device: Where it lies.
    """

    def __init__(self, net: nn.Module, device: torch.device) -> None:
        super().__init__()
        self._net, self._device = net, device

    def forward(self, inputs: Tensor) -> Tensor:
        """What the model makes of the inputs."""
        answers: Tensor = self._net(inputs.to(self._device))
        return answers.cpu()
