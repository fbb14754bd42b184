"""The optimizer that takes an average for a gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gradwire.attach.given import Named
from gradwire.errors import ConfigurationError
from gradwire.local_sgd.fragments import Fragment
from gradwire.plain import plain

_SAID = (int, float, str, tuple, list, type(None))

Outer = Optimizer | Callable[[list[Tensor]], Optimizer]


def check_outer(outer: Outer | None, optimizer: Optimizer, parameters: Named) -> None:
    """Raises ConfigurationError unless it is a function, or another fresh optimizer over the parameters."""
    if outer is optimizer:
        raise ConfigurationError("outer is the optimizer of the local steps itself; give another one")
    if isinstance(outer, Optimizer):
        theirs = {id(parameter) for group in outer.param_groups for parameter in group["params"]}
        ours = {id(parameter) for _, parameter in parameters}
        if theirs != ours:
            raise ConfigurationError(
                f"outer is an optimizer over {len(theirs)} parameters of which {len(theirs & ours)} are among the "
                f"{len(ours)} averaged; give one over the same parameters, or a function such as "
                "lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)"
            )
        if outer.state:
            raise ConfigurationError("outer has taken steps already; give a fresh optimizer")
    elif outer is not None and not callable(outer):
        raise ConfigurationError(
            f"outer is a {type(outer).__name__}; give an optimizer over the same parameters, or a function such as "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)"
        )


def adopted(outer: Outer | None, fragments: Sequence[Fragment]) -> Optimizer | None:
    """An optimizer over the fragments' anchors: made by the function, or the one given, whose groups are pointed there.

    Raises:
        ConfigurationError: If the function makes anything else.
    """
    if outer is None:
        return None
    if isinstance(outer, Optimizer):
        places: dict[int, list[Tensor]] = {}
        for fragment in fragments:
            for piece, anchor in zip(fragment.pieces, fragment.anchors, strict=True):
                places.setdefault(id(piece.parameter), []).append(anchor)
        for group in outer.param_groups:
            group["params"] = [anchor for parameter in group["params"] for anchor in places.get(id(parameter), [])]
            group.pop("param_names", None)
        return outer
    anchors = [anchor for fragment in fragments for anchor in fragment.anchors]
    made = outer(anchors)
    if not isinstance(made, Optimizer):
        raise ConfigurationError(f"outer made a {type(made).__name__}; let it return a torch.optim.Optimizer")
    if {id(each) for group in made.param_groups for each in group["params"]} != {id(each) for each in anchors}:
        raise ConfigurationError("outer made an optimizer over other tensors; let it take all those it is given")
    return made


def check_saved(outer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Raises ConfigurationError if an outer optimizer's state is of another kind, or of other groups."""
    ours, theirs = outer.param_groups, saved["param_groups"]
    sizes = [[len(group["params"]) for group in groups] for groups in (theirs, ours)]
    if sizes[0] != sizes[1]:
        raise ConfigurationError(
            f"the state's outer optimizer has groups of {sizes[0]} tensors, this one of {sizes[1]}; give outer "
            "the groups that were saved"
        )
    lacking = sorted({key for group in theirs for key in outer.defaults.keys() - group.keys()})
    if lacking:
        raise ConfigurationError(
            f"the state's outer optimizer has no {', '.join(map(repr, lacking))}, which {type(outer).__name__} has, so "
            "it is of another kind; give outer the kind that was saved"
        )


def described(outer: Outer | None) -> str:
    """Where the optimizer comes from, as text; what it is, :func:`groups_of` says."""
    return "none" if outer is None else "given" if isinstance(outer, Optimizer) else "made by a function"


def groups_of(outer: Optimizer | None) -> list[str]:
    """A line of text for each group of an outer optimizer, which must be the same on all ranks."""
    groups = [] if outer is None else outer.param_groups
    return [
        f"outer group {number} of {type(outer).__name__} with {len(group['params'])} tensors and {options(group)}"
        for number, group in enumerate(groups)
    ]


def options(group: dict[str, Any]) -> dict[str, str]:
    """A parameter group's hyper-parameters, as text; functions and other objects have none that ranks could share."""
    values = {key: plain(value) for key, value in group.items() if key not in ("params", "param_names")}
    return {key: str(value) for key, value in values.items() if isinstance(value, _SAID)}
