"""Which of the steps that torch tells of are whole ones.

A class whose ``step`` calls its parent's is told of twice, once anybody has made an optimizer of the parent's class.
"""

from __future__ import annotations

import sys

from torch.optim import Optimizer


def steps_within(optimizer: Optimizer) -> bool:
    """Whether its step may call another step of its own, which its class has taken the place of."""
    return sum("step" in vars(each) for each in type(optimizer).__mro__ if each is not Optimizer) > 1


def is_whole(optimizer: Optimizer) -> bool:
    """Whether the step that a hook is told of is no part of another; to be called by the hook."""
    told = sys._getframe(2)
    above = told.f_back
    while above is not None:
        if above.f_code is told.f_code and above.f_locals.get("self") is optimizer:
            return False
        above = above.f_back
    return True
