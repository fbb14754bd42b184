"""Resident memory at its highest, with Linux's high-water mark, which can be set back."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_CLEAR_PEAK = "5"


def reset_peak() -> bool:
    """Sets the mark back to what is resident now; whether the system can."""
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)  # else scratch that an earlier call freed, but kept resident, would not count
    try:
        Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK)
    except OSError:
        return False
    return True


def peak() -> int:
    """The mark, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])
