"""What a program sets for torch in its own thread, and what of it holds for us: nothing, as on the wire's thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def as_on_the_wire() -> Iterator[None]:
    """Neither autocast nor a default device that the program has set, inference mode or a graph; also a decorator."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))  # or what is made here could not be written to elsewhere
        stack.enter_context(torch.no_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):  # to enter it where it is off takes longer than all else here
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":  # each call of torch is slower where a device is set
            stack.enter_context(torch.device("cpu"))
        yield
