"""Parameter groups: their hyper-parameters, made valid."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.plain import number, plain

Group = dict[str, Any]
"""A parameter group."""

MISSING = {"maximize": "they go down: negate the loss", "amsgrad": "they keep no largest variance: leave it out"}
"""What torch's Adam takes of a group and these optimizers do not."""


def make_valid(group: Group) -> None:
    """Has a group hold numbers as Python has them, but for a learning rate that is a tensor, which schedules write to.

    Raises:
        ConfigurationError: If one is out of range, is no number, or is one that torch's Adam alone has.
    """
    for name, why in MISSING.items():
        if group.get(name):
            raise ConfigurationError(f"{name}={group[name]!r} of a group is no option of these optimizers; {why}")
    betas = group["betas"]
    if not (isinstance(betas, tuple | list) and len(betas) == 2 and all(0 <= number(beta) < 1 for beta in betas)):
        raise ConfigurationError(f"betas={betas!r} is out of range; choose two decays, each 0 <= beta < 1")
    group["betas"] = tuple(map(plain, betas))
    for name, least in (("lr", "0 <= "), ("weight_decay", "0 <= "), ("floor", "0 <= "), ("eps", "0 < ")):
        given = group[name]
        value = number(given)
        if not (value < float("inf") and (value > 0 or (value == 0 and name != "eps"))):
            raise ConfigurationError(f"{name}={given!r} is out of range; choose a number {least}{name}, and finite")
        if not (name == "lr" and isinstance(given, Tensor)):
            group[name] = plain(given)


def described(group: Group) -> str:
    """A group's hyper-parameters, as text."""
    return " ".join(f"{key}={value}" for key, value in sorted(group.items()) if key not in ("params", "param_names"))
