"""Imported last before processes are copied: Numba learns of all types, for half a second, with the first kernel.

And nothing that has been imported is looked through for garbage in every copy.
"""

import gc

from numba.core.registry import cpu_target

cpu_target.typing_context.refresh()
cpu_target.target_context.refresh()
gc.freeze()
