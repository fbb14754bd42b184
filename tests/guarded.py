"""Memory that ends or begins at a page that cannot be touched: whoever goes beyond it is killed."""

from __future__ import annotations

import ctypes
import mmap

import torch

PAGE = mmap.PAGESIZE
NO_ACCESS = 0

_protect = ctypes.CDLL(None).mprotect

_kept: list[mmap.mmap] = []


def guarded(numel: int, at_the_end: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros that begin right after a page that cannot be touched, or end right before one."""
    if not numel:
        return torch.empty(0, dtype=dtype)
    size = dtype.itemsize * numel
    room = -(-size // PAGE) * PAGE
    memory = mmap.mmap(-1, room + 2 * PAGE)
    _kept.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (start, start + PAGE + room):
        assert _protect(ctypes.c_void_p(page), PAGE, NO_ACCESS) == 0
    offset = PAGE + (room - size if at_the_end else 0)
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)


def copied(source: torch.Tensor, at_the_end: bool = True) -> torch.Tensor:
    """A copy between such pages."""
    return guarded(source.numel(), at_the_end, source.dtype).copy_(source.reshape(-1)).view(source.shape)


def release() -> None:
    """Gives back what no tensor uses any more."""
    _kept.clear()
