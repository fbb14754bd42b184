"""How much room a payload has where what is to be sent depends on the data."""

from __future__ import annotations

SPARE = 5 / 4
"""A step's capacity, relative to the most that any rank wanted to send in the step before."""

SHRINK = 1 / 2
"""A capacity never falls to less than this in one step, because a quiet step does not mean that the next one is."""


def following(capacity: float, most: float) -> float:
    """The capacity of the next step, in the same unit.

    Args:
        capacity: This step's.
        most: What any rank wanted at most, whether or not it fitted.
    """
    return max(SPARE * most, SHRINK * capacity)
