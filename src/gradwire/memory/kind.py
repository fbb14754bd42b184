"""Whose a remembered tensor is: what becomes of it when the number of workers changes, without a table of names."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """Said where a field is first asked of the :class:`~gradwire.memory.Store`, and saved with it.

    Attributes:
        MEAN: Each worker has its own, and what counts is the workers' mean: residuals, momenta, velocities.
        OWNED: Each worker has it of the elements that it owns on the sharded route.
        SHARED: The same on every worker: factors, bases, estimates and capacities that all derive from the same bytes.
        PRIVATE: Each worker's own guide to its own values, such as how many stages its fit takes.
        GIVEN: Each worker's own, from outside between steps; the step that reads it clears it.
        WORLD: Good for one number of workers only, and found anew for another.
    """

    MEAN = "mean"
    OWNED = "owned"
    SHARED = "shared"
    PRIVATE = "private"
    GIVEN = "given"
    WORLD = "world"
