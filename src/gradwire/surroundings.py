"""What a program sets for torch in its own thread, and what of it holds for us: nothing, as on the wire's thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def as_on_the_wire() -> Iterator[None]:
    """Neither autocast nor a default device that the program has set; also a decorator."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), ExitStack() as stack:
        if torch.get_default_device().type != "cpu":  # each call of torch is slower where a device is set
            stack.enter_context(torch.device("cpu"))
        yield
