"""The way in for local updates: an ordinary optimizer whose steps are averaged from time to time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.optim import Optimizer

from gradwire.attach.given import Named, check_named, check_parameters, default_group, named_by
from gradwire.attach.roll_call import RollCall
from gradwire.attach.wrappers import unwrapped_optimizer
from gradwire.codecs.codec import Codec
from gradwire.engine.choices import FUSE_BYTES, Choices
from gradwire.engine.configuration import Configuration
from gradwire.engine.guarding import Guarding
from gradwire.errors import ConfigurationError
from gradwire.local_sgd.handle import Periodic
from gradwire.local_sgd.outer import Outer, check_outer
from gradwire.local_sgd.schedule import Cut, Moments, Schedule
from gradwire.memory import Memory
from gradwire.methods import Method
from gradwire.policy import DensePolicy


def periodic(
    optimizer: Optimizer,
    *,
    every: int | Callable[[int], int] = 8,
    method: str | Method = "dense",
    parameters: Iterable[tuple[str, Parameter]] | None = None,
    outer: Outer | None = None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    granularity: str | None = None,
    route: str | None = None,
    memory: str | Memory | None = None,
    owner: str | Codec | None = None,
    dense: DensePolicy | None = None,
    seed: int = 0,
    fuse_bytes: int = FUSE_BYTES,
    verify_every: int = 0,
    inside: int | str | None = None,
    name: str | None = None,
    warmup_steps: int = 0,
    moments: Moments = "keep",
    buffers: nn.Module | None = None,
    fragments: int = 1,
    cut: Cut = "contiguous",
    delay: int = 0,
    mix: float = 1.0,
    eager: bool = False,
    broadcast: bool = False,
    **options: Any,
) -> Periodic:
    """Lets every worker take local steps, and from now on averages compressed parameter changes from time to time.

    After every ``every`` steps of the optimizer, ``change = x_last - x`` is compressed, averaged over all workers, and
    ``x = x_last = x_last - average``, the same bits on every rank: PQASGD (Jiang & Agrawal 2018), and with an outer
    optimizer, which takes the average for a gradient at ``x_last``, DiLoCo (Douillard et al. 2023, arXiv:2311.08105).
    A model in fragments is averaged part by part, evenly spread over the period; an average may be taken some steps
    after it was sent, while training goes on: Streaming DiLoCo (Douillard et al. 2025, arXiv:2501.18512), and with
    ``eager`` updates a whole period after it (Kale et al. 2025, arXiv:2502.12996).

    To be called on every rank, with the same arguments and the same model, before the first local step; every rank must
    take as many steps. ``x_last`` and the change are float32, 8 bytes a parameter; with half-precision parameters each
    period starts from ``x_last`` rounded, and the change is measured from there, so that nothing is lost in rounding.

    If a change, moment or buffer of some rank is not finite, nobody takes that average: the fragment's parameters and
    the buffers go back on all ranks to where the last average left them, memories are as before it, and the optimizer's
    state is zeroed where it is not finite, all moments of a coordinate together. On a rank where other fragments are
    not finite by then, so do these.

    Args:
        optimizer: Any optimizer, with the worker's own gradients, also within Accelerate's or Lightning's; nothing else
            may change its parameters. Of DTensors, such as FSDP2's, every rank averages the part that it holds.
        every: Local steps of a period, or a function that gives them for the number of the period, from 0, the same on
            all ranks.
        method: A name of ``gradwire.methods.names()`` or a method object. Averages that are no means, such as
            ``signsgd``'s votes, are of size one and not of the changes': they need an ``outer``, and no warm-up.
        parameters: Names and parameters, as ``net.named_parameters()`` gives them, by which state is kept; those the
            optimizer does not have are left out. If None, the optimizer's own names, or ``"group.index"``.
        outer: An optimizer that takes averages for gradients: a function that makes one over the float32 tensors it is
            given (a parameter each, or a piece of one), or a fresh one over the same parameters, whose groups are
            pointed to such tensors. None for plain averages.
        process_group: The workers, also as a device mesh of one dimension; all of them if None. Within a group, such as
            a node, ranks may average gradients in every step: give the group that crosses them.
        granularity: As in :func:`gradwire.compress`; a fragment is what it works on.
        route: See there.
        memory: See there; a memory that is momentum has no place here.
        owner: See there.
        dense: See there.
        seed: See there.
        fuse_bytes: See there.
        verify_every: Every so many averages of a fragment it is compared over all ranks what the last one left,
            ``x_last`` and buffers, along with the next, and in ``synchronize()``; a difference raises
            :class:`gradwire.DivergenceError` on every rank. Payloads then carry checksums, as there. 0 for never.
        inside: As in :func:`gradwire.compress`: changes are averaged within nodes before they are between them.
        name: See there.
        warmup_steps: Local steps at first that are each averaged, at once and without ``outer``.
        moments: ``"keep"`` the optimizer's moments local, ``"reset"`` its state with every average, or ``"average"``
            floating-point state of the parameters' shape, densely, which ``eager`` updates cannot.
        buffers: A module whose floating-point buffers, such as batch norm's statistics, are averaged once a period;
            with ``eager`` only where training waits for averages, in :meth:`Periodic.synchronize` and the warm-up.
        fragments: Parts in which the model is averaged, at most the steps of a period.
        cut: ``"contiguous"`` or ``"strided"`` coordinates, or whole ``"layers"``.
        delay: Local steps between sending an average and taking it, fewer than the period has.
        mix: Weight of the average where it is taken, in (0, 1]; local values have the rest (there alpha = 1 - mix).
        eager: Whether an average has until the fragment's next one to travel. Meanwhile each worker goes on from where
            ``outer`` would take its own share, ``change / n``, for the average of that change; with the average itself
            this is taken back. Another 4 bytes a parameter.
        broadcast: Whether all ranks start from rank 0's parameters and buffers; otherwise they must be equal.
        **options: The method's hyper-parameters.

    Returns:
        A handle with counters, state and :meth:`Periodic.synchronize`.

    Raises:
        ConfigurationError: If anything cannot be as asked, or differs between ranks; nothing is changed.

    Example:
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> handle = gradwire.periodic(optimizer, every=8, method="qsgd", bits=4)
        >>> for _ in range(8):
        ...     net(inputs).sum().backward(); optimizer.step()
        >>> handle.stats().steps
        8
    """
    given = locals()
    return attached(Periodic, optimizer, {**{name: given[name] for name in DEFAULTS}, **options})


DEFAULTS: Mapping[str, Any] = periodic.__kwdefaults__ or {}
"""What :func:`periodic` takes by name, and what it is where nothing is given."""

Kind = TypeVar("Kind", bound=Periodic)


def attached(kind: type[Kind], optimizer: Optimizer, options: Mapping[str, Any]) -> Kind:
    """A handle of some class, as :func:`periodic` makes one.

    Args:
        kind: The class.
        optimizer: Whose steps are local.
        options: Of :func:`periodic`, and the method's hyper-parameters.

    Raises:
        ConfigurationError: As there.
    """
    given = {**DEFAULTS, **options}
    choices = replace(Choices.of(given), rollback=False)
    workers = default_group(given["process_group"])
    with RollCall(workers) as roll_call:
        optimizer = unwrapped_optimizer(optimizer)
        _check_optimizer(optimizer, workers)
        schedule = Schedule(**{each.name: given[each.name] for each in fields(Schedule)})
        _check_fused(optimizer, schedule)
        hyper = {name: value for name, value in options.items() if name not in DEFAULTS}
        configuration, guarding = Configuration.of(given["method"], hyper, choices), Guarding(choices)
        schedule.check(configuration, outer=given["outer"] is not None)
        named = _named(optimizer, given["parameters"])
        check_parameters(named)
        check_outer(given["outer"], optimizer, named)
        _check_buffers(given["buffers"])
        beside = {name: given[name] for name in ("outer", "buffers", "broadcast")}
        return kind(optimizer, configuration, schedule, guarding, named, group=workers, roll_call=roll_call, **beside)


def _check_optimizer(optimizer: Optimizer, workers: dist.ProcessGroup) -> None:
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(f"optimizer is a {kind}; give a torch.optim.Optimizer")
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        raise ConfigurationError(
            f"optimizer is a {kind}, which never called Optimizer.__init__ and so tells nobody of its steps; give the "
            "optimizer inside it, if there is one"
        )
    theirs = getattr(optimizer, "process_group", None)
    if isinstance(theirs, dist.ProcessGroup):
        both = {*dist.get_process_group_ranks(theirs)}.intersection(dist.get_process_group_ranks(workers))
        if len(both) > 1:
            raise ConfigurationError(
                f"optimizer is a {kind}, whose steps ranks {sorted(both)} take together, so none of them is a worker's "
                "own; give an ordinary optimizer, or the process_group that crosses theirs"
            )
    for hook in optimizer._optimizer_step_post_hooks.values():
        if isinstance(getattr(hook, "__self__", None), Periodic):
            raise ConfigurationError("the optimizer is averaged periodically already; close that handle first")


def _check_fused(optimizer: Optimizer, schedule: Schedule) -> None:
    together = any(group.get("fused") and group.get("momentum") for group in optimizer.param_groups)
    if together and schedule.moments == "reset" and schedule.fragments > 1:
        raise ConfigurationError(
            f"moments='reset' with fragments={schedule.fragments!r} forgets the momenta of some parameters at a time, "
            f"and a fused {type(optimizer).__name__} takes a group's only if all or none are there; choose "
            "fused=False, or fragments=1"
        )


def _check_buffers(buffers: object) -> None:
    if not (buffers is None or isinstance(buffers, nn.Module)):
        raise ConfigurationError(
            f"buffers is a {type(buffers).__name__}; give the module whose buffers are to be averaged, or None"
        )


def _named(optimizer: Optimizer, parameters: Iterable[tuple[str, Parameter]] | None) -> Named:
    """The optimizer's parameters that require gradients, by name."""
    ours = {id(each): (name, each) for name, each in named_by(optimizer) if each.requires_grad}
    if parameters is None:
        return list(ours.values())
    named = [(name, each) for name, each in check_named(parameters) if id(each) in ours]
    if len({id(each) for _, each in named}) < len(ours):
        raise ConfigurationError(
            f"parameters names {len(named)} of the {len(ours)} that the optimizer has; name all of them, as "
            "net.named_parameters() does"
        )
    return named
