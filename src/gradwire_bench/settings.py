"""With what settings each method trains the workloads.

All take plain SGD: with momentum 0.9, EF-SignSGD and ACP-SGD fall behind dense training in so short a run.
"""

from __future__ import annotations

from dataclasses import dataclass

import gradwire
from gradwire_bench.contenders import DDP, Contender
from gradwire_bench.workloads import Workload


@dataclass(frozen=True)
class Recipe:
    """What one method needs to train well in a short run.

    Attributes:
        learning_rate: Of plain SGD at its peak, as a multiple of what the workload takes for dense training.
        options: As they follow the name on the command line; the method's defaults if empty.
    """

    learning_rate: float = 1.0
    options: str = ""


_RECIPES = {
    # Every coordinate moves by the learning rate.
    "signsgd": Recipe(0.01),
    "signum": Recipe(0.01),
    "lion": Recipe(0.01),
    "lioncub": Recipe(0.01),
    "demo": Recipe(0.01),
    # So does every matrix as a whole, by its own size.
    "dion": Recipe(0.1),
    # A momentum of 0.9 in the memory makes a step ten times as long.
    "dgc": Recipe(0.2, "ratio=0.01,warmup=40"),
    "sketchedsgd": Recipe(0.5, "ratio=0.02,columns=4.0"),
    # In a hundred steps, what is sent of 1 % or less comes too late.
    "randomk": Recipe(options="ratio=0.1"),
    "gtopk": Recipe(options="ratio=0.02"),
    "ef21": Recipe(options="ratio=0.05"),
    "ef21sgdm": Recipe(options="ratio=0.05"),
    "gaussiank": Recipe(options="ratio=0.03"),
    "sidco": Recipe(options="ratio=0.03"),
    "scalecom": Recipe(options="ratio=0.02"),
    "adaptive": Recipe(options="memory=residual"),
    # By default it would only learn its bases in so few steps.
    "gradiveq": Recipe(options="learn_steps=20,use_steps=80"),
}


def learning_rate(contender: Contender, workload: Workload) -> float:
    """The peak learning rate for a contender."""
    return workload.learning_rate * _RECIPES.get(contender.name, Recipe()).learning_rate


def everyone() -> list[str]:
    """Plain DDP and every method of the catalogue at its recommended settings, as on the command line."""
    return [DDP, *(f"{name}:{_RECIPES.get(name, Recipe()).options}".rstrip(":") for name in gradwire.methods.names())]
