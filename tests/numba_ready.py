"""Imported before processes are copied: Numba learns of all types, for half a second, with the first kernel."""

from numba.core.registry import cpu_target

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
