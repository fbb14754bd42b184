"""The way in for local updates: an ordinary optimizer whose steps are averaged from time to time."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwire.codec import Codec
from gradwire.errors import ConfigurationError
from gradwire.memory import MaskedMomentum, Memory, Momentum, Snapshot
from gradwire.methods import Method, name_of
from gradwire.train.agreement import check_same
from gradwire.train.configuration import FUSE_BYTES, Configuration
from gradwire.train.guards import Guarding
from gradwire.train.handle import Handle, Named, check_parameters, default_group, named_by
from gradwire.train.periodic.beside import (
    AveragedBuffers,
    AveragedMoments,
    Beside,
    KeptMoments,
    ResetMoments,
    Values,
    in_step,
)
from gradwire.train.periodic.beside import averaged as averaged_beside
from gradwire.train.periodic.drift import Drift
from gradwire.train.periodic.finite import finite
from gradwire.train.periodic.fragments import Fragment, Stretch, cut
from gradwire.train.periodic.outer import Outer, adopted, check_outer, described
from gradwire.train.periodic.schedule import Cut, Moments, Schedule
from gradwire.train.periodic.start import check_equal, send_first
from gradwire.train.policy import DensePolicy
from gradwire.train.unit import Unit
from gradwire.wire import ProcessGroupTransport, Stats, Synchronization
from gradwire.wire.meter import all_reduce_bytes

_COUNTERS = ("steps_done", "syncs", "dropped", "_periods", "_began", "_length")

_MOMENTS: dict[Moments, type[KeptMoments]] = {
    "keep": KeptMoments,
    "reset": ResetMoments,
    "average": AveragedMoments,
}


@dataclass(eq=False)
class _Flight:
    """An average on its way.

    Attributes:
        fragment: Of what.
        due: The local step after which it is taken.
        mix: Weight of the average where it is taken.
        outer: What takes it for a gradient, if anything does.
        beside: What is averaged with it.
        dropped: Whether it turned out not to be finite.
        landing: Waits until it has landed, and raises whatever went wrong on the wire; None once it has.
    """

    fragment: Fragment
    due: int
    mix: float
    outer: Optimizer | None
    beside: Values
    dropped: bool = False
    landing: Callable[[], None] | None = None

    def wait(self) -> None:
        """Waits until it has landed.

        Raises:
            Exception: Whatever went wrong on the wire.
        """
        if self.landing is not None:
            self.landing()
            self.landing = None


class Periodic(Handle):
    """Periodic averaging attached to an optimizer; made by :func:`periodic`.

    Attributes:
        outer: The optimizer that takes averages for gradients, if there is one: its learning rate may be scheduled.
        steps_done: Local steps.
        syncs: Averages taken, each fragment's counted for itself.
        dropped: Averages that were not taken because they were not finite.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        configuration: Configuration,
        schedule: Schedule,
        guarding: Guarding,
        parameters: Named,
        outer: Outer | None,
        buffers: nn.Module | None,
        group: dist.ProcessGroup,
        broadcast: bool,
    ) -> None:
        fragments = cut(parameters, schedule, configuration.granularity)
        made = None if isinstance(outer, Optimizer) else adopted(outer, fragments)
        self._buffers = None if buffers is None else AveragedBuffers(buffers)
        self._beside: list[Beside] = [_MOMENTS[schedule.moments](optimizer)]
        self._beside += [] if self._buffers is None else [self._buffers]
        comparison = partial(Drift, fragments, self._beside)
        super().__init__(configuration, parameters, group, dataclasses.replace(guarding, comparison=comparison))
        pieces = [piece for fragment in fragments for piece in fragment.pieces]
        self._shapes = {piece.name: piece.shape for piece in pieces}
        self._parameters = {
            piece.name: {"shape": list(piece.shape), "dtype": str(piece.parameter.dtype)} for piece in pieces
        }
        self._before = [
            Snapshot(self.engine.store, [piece.name for piece in fragment.pieces]) for fragment in fragments
        ]
        self._hook: RemovableHandle | None = None
        self._optimizer = optimizer
        self._schedule = schedule
        self._fragments = fragments
        try:
            lines = [f"{key}={value}" for key, value in {**schedule.describe(), "outer": described(outer)}.items()]
            tensors = [(name, each.detach()) for name, each in parameters]
            tensors += [] if buffers is None else list(buffers.named_buffers())
            transport = ProcessGroupTransport(self._group)
            check_same(lines, transport, self.engine.store.device)
            if broadcast:
                send_first(tensors, transport)
            else:
                check_equal(tensors, transport, self.engine.store.device)
            self._units = [
                [(stretch, self.engine.unit(stretch.slots)) for stretch in fragment.stretches] for fragment in fragments
            ]
        except Exception:
            self.close()
            raise
        for fragment in fragments:
            fragment.start()
        if self._buffers is not None:
            self._buffers.start()
        self.outer = adopted(outer, fragments) if isinstance(outer, Optimizer) else made
        self.steps_done = self.syncs = self.dropped = 0
        self._dense_bytes = all_reduce_bytes(sum(each.nbytes for _, each in parameters), transport.world_size)
        self._flights: list[_Flight] = []
        self._periods = 0
        self._begin_period()
        self._hook = optimizer.register_step_post_hook(self._after_step)

    def synchronize(self) -> None:
        """Averages now whatever may differ between ranks, such as at the end of training.

        What is on its way is taken first. The averages are taken undelayed and unmixed, so that all ranks have the
        same parameters afterwards, and a new period begins.

        Raises:
            GradwireError: If an earlier average failed.
        """
        self._take(self._flights)
        behind = [fragment for fragment in self._fragments if fragment.level < self.steps_done]
        outer = None if self._warm else self.outer
        self._take([self._launch(fragment, self.steps_done, 1.0, outer) for fragment in behind])
        if self.steps_done > self._began:
            self._begin_period()

    def stats(self) -> Stats:
        """Totals of this rank since the method was attached: ``steps`` are local ones.

        ``dense_bytes`` is what a dense all-reduce of the gradients in every local step would have handed over.
        """
        return dataclasses.replace(
            super().stats(), steps=self.steps_done, dense_bytes=self.steps_done * self._dense_bytes
        )

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs beside the model's and the optimizer's own state, to go on as if it had not stopped.

        Averages on their way are waited for and saved with it. Every rank has its own state; save it on each, with the
        model's, which differs between ranks in the middle of a period.
        """
        for flight in self._flights:
            flight.wait()
        flying = [flight.fragment for flight in self._flights]
        return {
            **super().state_dict(),
            "periodic": {
                "schedule": self._schedule.describe(),
                **{name: getattr(self, name) for name in _COUNTERS},
                "rounds": [fragment.rounds for fragment in self._fragments],
                "level": [fragment.level for fragment in self._fragments],
                "anchors": _copied(each for fragment in self._fragments for each in fragment.named(fragment.anchor)),
                "averages": _copied(each for fragment in flying for each in fragment.named(fragment.change)),
                "flights": [
                    {
                        "fragment": flight.fragment.number,
                        "due": flight.due,
                        "mix": flight.mix,
                        "outer": flight.outer is not None,
                        "dropped": flight.dropped,
                        "beside": _copied(flight.beside.items()),
                    }
                    for flight in self._flights
                ],
                "buffers": {} if self._buffers is None else _copied(self._buffers.last.items()),
                "outer": None if self.outer is None else copy.deepcopy(self.outer.state_dict()),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from where :meth:`state_dict` was taken; the model's and the optimizer's state is for you to load.

        Raises:
            ConfigurationError: If the state is of another version, configuration, schedule or model; nothing is
                changed.
        """
        saved = state.get("periodic")
        if saved is None:
            raise ConfigurationError("the state is not of periodic averaging; load it where it was saved")
        ours: dict[str, object] = {**self._schedule.describe(), "outer": self.outer is not None}
        for key, value in {**saved["schedule"], "outer": saved["outer"] is not None}.items():
            if ours[key] != value:
                raise ConfigurationError(
                    f"the state was saved with {key}={value!r}, this handle has {key}={ours[key]!r}; "
                    "attach with the same"
                )
        kept = {} if self._buffers is None else self._buffers.last
        _check_shapes("buffers", {name: tuple(each.shape) for name, each in kept.items()}, saved["buffers"])
        _check_shapes("parameters", self._shapes, saved["anchors"])
        for flight in self._flights:
            flight.wait()
        super().load_state_dict(state)
        for name in _COUNTERS:
            setattr(self, name, saved[name])
        numbers = [flight["fragment"] for flight in saved["flights"]]
        for fragment, rounds, level in zip(self._fragments, saved["rounds"], saved["level"], strict=True):
            fragment.rounds, fragment.level = rounds, level
            for name, anchor in fragment.named(fragment.anchor):
                anchor.copy_(saved["anchors"][name])
            for name, average in fragment.named(fragment.change) if fragment.number in numbers else ():
                average.copy_(saved["averages"][name])
        self._flights = [
            _Flight(
                self._fragments[flight["fragment"]],
                flight["due"],
                flight["mix"],
                self.outer if flight["outer"] else None,
                {name: each.to(self.engine.store.device) for name, each in flight["beside"].items()},
                flight["dropped"],
            )
            for flight in saved["flights"]
        ]
        for name, last in kept.items():
            last.copy_(saved["buffers"][name])
        if self.outer is not None:
            self.outer.load_state_dict(saved["outer"])
        self._look_ahead()

    def close(self) -> None:
        """Takes averaging off the optimizer; an average on its way is not taken, see :meth:`synchronize`."""
        if self._hook is not None:
            self._hook.remove()
        super().close()

    def __repr__(self) -> str:
        schedule = ", ".join(f"{key}={value}" for key, value in self._schedule.describe().items())
        return f"gradwire.Periodic({schedule}; {super().__repr__()})"

    def _after_step(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        """Counts a local step; there is nothing else to do in most of them."""
        self.steps_done += 1
        if self.steps_done >= self._next:
            self._act()

    @torch.no_grad()
    def _act(self) -> None:
        """Takes averages that are due, sends those whose turn it is, and begins a period when one has ended."""
        now, schedule = self.steps_done, self._schedule
        self._take([flight for flight in self._flights if flight.due <= now])
        step = now - self._began
        late, mix, outer = (0, 1.0, None) if self._warm else (schedule.delay, schedule.mix, self.outer)
        for fragment in self._fragments:
            if step == schedule.due(fragment.number, self._length):
                self._take([flight for flight in self._flights if flight.fragment is fragment])
                self._launch(fragment, now + late, mix, outer)
        self._take([flight for flight in self._flights if flight.due <= now])
        if step >= self._length:
            self._begin_period()
        self._look_ahead()

    def _begin_period(self) -> None:
        if self.steps_done < self._schedule.warmup_steps:
            self._length = 1
        else:
            self._length = self._schedule.length(self._periods)
            self._periods += 1
        self._began = self.steps_done
        self._look_ahead()

    @property
    def _warm(self) -> bool:
        """Whether the period is one of the warm-up's."""
        return self._began < self._schedule.warmup_steps

    def _look_ahead(self) -> None:
        """Finds the local step after which there is something to do."""
        turns = [self._began + self._schedule.due(each.number, self._length) for each in self._fragments]
        dues = [flight.due for flight in self._flights]
        self._next = min(step for step in [*turns, *dues, self._began + self._length] if step > self.steps_done)

    def _launch(self, fragment: Fragment, due: int, mix: float, outer: Optimizer | None) -> _Flight:
        """Measures how far a fragment went, and queues its average stretch by stretch."""
        engine, wire, before = self.engine, self.wire, self._before[fragment.number]
        landing = wire.promise()
        beside: Values = {}
        for each in self._beside:
            beside.update(each.collect(fragment))
        flight = _Flight(fragment, due, mix, outer, beside, landing=lambda: wire.wait(landing))
        now, step = self.steps_done, fragment.rounds

        def begin(stretch: Stretch, unit: Unit) -> list[Synchronization]:
            engine.step = step
            return engine.synchronizations(unit, stretch.change)

        def begin_first(stretch: Stretch, unit: Unit) -> list[Synchronization]:
            if not before.current:
                before.take()
            along = [averaged_beside(beside)] if beside else []
            return [*begin(stretch, unit), in_step(now, stretch.change.device), *along]

        def done(stretch: Stretch, unit: Unit) -> None:
            engine.landed(unit, stretch.change)
            flight.dropped |= not finite(stretch.change)

        def end() -> None:
            engine.ended()
            flight.dropped |= not all(map(finite, beside.values()))
            if flight.dropped:
                before.restore()
            wire.keep(landing, fragment.change)
            if not flight.dropped:
                before.take()

        first, last = self._units[fragment.number][0], self._units[fragment.number][-1]
        for pair in self._units[fragment.number]:
            pair[0].measure()
            begins = begin_first if pair is first else begin
            wire.submit(partial(begins, *pair), partial(done, *pair), end if pair is last else None)
        self._flights.append(flight)
        return flight

    @torch.no_grad()
    def _take(self, flights: Iterable[_Flight]) -> None:
        """Waits for averages and moves the model by them."""
        for flight in list(flights):
            self._flights.remove(flight)
            flight.wait()
            fragment = flight.fragment
            if flight.dropped or flight.mix == 1:
                fragment.level = self.steps_done
            if flight.dropped:
                self.dropped += 1
                fragment.hand_on(mix=1.0)
                for each in self._beside:
                    each.drop(fragment)
                continue
            fragment.move(flight.outer)
            fragment.hand_on(flight.mix)
            for each in self._beside:
                each.take(fragment, flight.beside)
            fragment.rounds += 1
            self.syncs += 1


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
    verify: bool = False,
    verify_every: int = 1,
    warmup_steps: int = 0,
    moments: Moments = "keep",
    buffers: nn.Module | None = None,
    fragments: int = 1,
    cut: Cut = "contiguous",
    delay: int = 0,
    mix: float = 1.0,
    broadcast: bool = False,
    **options: Any,
) -> Periodic:
    """Lets every worker take local steps, and from now on averages compressed parameter changes from time to time.

    After every ``every`` steps of the optimizer, ``change = x_last - x`` is compressed, averaged over all workers, and
    ``x = x_last = x_last - average``, the same bits on every rank: PQASGD (Jiang & Agrawal 2018), and with an outer
    optimizer, which takes the average for a gradient at ``x_last``, DiLoCo (Douillard et al. 2023, arXiv:2311.08105).
    A model in fragments is averaged part by part, evenly spread over the period; an average may be taken some steps
    after it was sent, while training goes on: Streaming DiLoCo (Douillard et al. 2025, arXiv:2501.18512).

    To be called on every rank, with the same arguments and the same model, before the first local step; every rank must
    take as many steps. ``x_last`` and the change are float32, 8 bytes a parameter; with half-precision parameters each
    period starts from ``x_last`` rounded, and the change is measured from there, so that nothing is lost in rounding.

    If a change, moment or buffer of some rank is not finite, nobody takes that average: the fragment's parameters and
    the buffers go back on all ranks to where the last average left them, memories are as before it, and moments that
    are not finite are zeroed.

    Args:
        optimizer: Any optimizer, with the worker's own gradients; nothing else may change its parameters.
        every: Local steps of a period, or a function that gives them for the number of the period, from 0, the same on
            all ranks.
        method: A name of ``gradwire.methods.names()`` or a method object. Votes such as ``signsgd`` have steps of one,
            not of the changes' size: give them an ``outer`` with a learning rate.
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
        verify: Whether payloads carry checksums, as there. It also compares over all ranks what the last average of a
            fragment left, ``x_last`` and buffers, along with its next one; a difference raises
            :class:`gradwire.DivergenceError` on every rank.
        verify_every: Averages of a fragment from one such comparison to the next.
        warmup_steps: Local steps at first that are each averaged, at once and without ``outer``.
        moments: ``"keep"`` the optimizer's moments local, ``"reset"`` its state with every average, or ``"average"``
            floating-point state of the parameters' shape, densely.
        buffers: A module whose floating-point buffers, such as batch norm's statistics, are averaged once a period.
        fragments: Parts in which the model is averaged, at most the steps of a period.
        cut: ``"contiguous"`` or ``"strided"`` coordinates, or whole ``"layers"``.
        delay: Local steps between sending an average and taking it, fewer than the period has.
        mix: Weight of the average where it is taken, in (0, 1]; local values have the rest (there alpha = 1 - mix).
        broadcast: Whether all ranks start from rank 0's parameters and buffers; otherwise they must be equal.
        **options: The method's hyper-parameters.

    Returns:
        A handle with counters, state and :meth:`Periodic.synchronize`.

    Raises:
        ConfigurationError: If anything cannot be as asked, or differs between ranks; nothing is changed.

    Example:
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)                          # doctest: +SKIP
        >>> handle = gradwire.periodic(optimizer, every=8, method="qsgd", bits=4)          # doctest: +SKIP
    """
    _check_optimizer(optimizer)
    schedule = Schedule(every, fragments, cut, delay, mix, warmup_steps, moments)
    configuration = Configuration.make(method, options, granularity, route, memory, owner, dense, seed, fuse_bytes)
    guarding = Guarding(rollback=False, verify=verify, verify_every=verify_every)
    _check_method(configuration, schedule)
    named = _named(optimizer, parameters)
    check_parameters(named)
    check_outer(outer, optimizer, named)
    if isinstance(process_group, DeviceMesh):
        if process_group.ndim != 1:
            raise ConfigurationError(
                f"process_group is a device mesh of {process_group.ndim} dimensions; give one, such as mesh['nodes']"
            )
        process_group = process_group.get_group()
    group = default_group(process_group)
    return Periodic(optimizer, configuration, schedule, guarding, named, outer, buffers, group, broadcast)


def _copied(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}


def _check_shapes(what: str, ours: Mapping[str, tuple[int, ...]], saved: Mapping[str, Tensor]) -> None:
    theirs = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            raise ConfigurationError(
                f"of {what}, the state has {name!r} with shape {theirs.get(name)}, this handle with {ours.get(name)}; "
                "load a state saved from the same model"
            )


def _check_optimizer(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(f"optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer")
    for hook in optimizer._optimizer_step_post_hooks.values():
        if isinstance(getattr(hook, "__self__", None), Periodic):
            raise ConfigurationError("the optimizer is averaged periodically already; close that handle first")


def _check_method(configuration: Configuration, schedule: Schedule) -> None:
    method, carried = configuration.method, configuration.memory
    if isinstance(carried, Momentum | MaskedMomentum):
        raise ConfigurationError(
            f"memory={carried} is momentum of gradients, and local steps have theirs; choose memory='residual' or "
            "'none', and outer=torch.optim.SGD(..., momentum=0.9) for momentum of averages"
        )
    if schedule.fragments > 1 and schedule.cut != "layers" and method.granularities == ("layer",):
        raise ConfigurationError(
            f"{name_of(method)} cannot work on cut={schedule.cut!r} because "
            f"{method.why_granularity}; choose cut='layers'"
        )


def _named(optimizer: Optimizer, parameters: Iterable[tuple[str, Parameter]] | None) -> Named:
    """The optimizer's parameters that require gradients, by name."""
    ours = {id(each): (name, each) for name, each in named_by(optimizer)}
    if parameters is None:
        return list(ours.values())
    named = [(name, each) for name, each in parameters if id(each) in ours]
    if len({id(each) for _, each in named}) < len(ours):
        raise ConfigurationError(
            f"parameters names {len(named)} of the {len(ours)} that the optimizer has; name all of them, as "
            "net.named_parameters() does"
        )
    return named
