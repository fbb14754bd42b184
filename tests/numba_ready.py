"""Imported before processes are copied: what Numba knows of types, which takes it half a second with its first kernel."""

from numba.core.registry import cpu_target

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
