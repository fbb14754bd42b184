"""What periodic averaging gives back: when which fragment is averaged, counters, and state."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwire.attach.given import Named
from gradwire.attach.handle import Handle
from gradwire.attach.roll_call import RollCall
from gradwire.attach.shards import local, part_of
from gradwire.attach.tree import Trained
from gradwire.engine.agreement import check_equal, check_same
from gradwire.engine.configuration import Configuration
from gradwire.engine.guarding import Guarding
from gradwire.engine.mixture import Mixture, Settled
from gradwire.engine.stats import Stats
from gradwire.errors import ConfigurationError
from gradwire.local_sgd.beside import (
    AveragedBuffers,
    AveragedMoments,
    Beside,
    KeptMoments,
    ResetMoments,
    in_step,
    on_any_rank,
)
from gradwire.local_sgd.drift import Drift
from gradwire.local_sgd.fragments import Fragment, cut
from gradwire.local_sgd.outer import Outer, adopted, check_saved, described, groups_of
from gradwire.local_sgd.pending import NEXT, PendingAverages, copied
from gradwire.local_sgd.schedule import Moments, Schedule
from gradwire.local_sgd.start import REMEDY, send_first
from gradwire.local_sgd.steps import is_whole, steps_within
from gradwire.state.form import check_form
from gradwire.surroundings import as_on_the_wire
from gradwire.wire import Synchronization, transport_for

_COUNTERS = ("steps_done", "_periods", "_began", "_length")
_KEPT = ("schedule", *_COUNTERS, *PendingAverages.kept, "buffers", "outer")

_MOMENTS: dict[Moments, type[KeptMoments]] = {
    "keep": KeptMoments,
    "reset": ResetMoments,
    "average": AveragedMoments,
}


class Periodic(Handle):
    """Periodic averaging attached to an optimizer; made by :func:`periodic`.

    Attributes:
        outer: The optimizer that takes averages for gradients, if there is one: its learning rate may be scheduled.
        steps_done: Local steps.
    """

    _hook: RemovableHandle | None = None
    _replicas = False  # those of rank 0 may be sent first

    @as_on_the_wire()
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
        roll_call: RollCall,
        broadcast: bool,
    ) -> None:
        fragments = cut(parameters, schedule, configuration.granularity)
        made = None if isinstance(outer, Optimizer) else adopted(outer, fragments)
        self._buffers = None if buffers is None else AveragedBuffers(buffers)
        beside: list[Beside] = [_MOMENTS[schedule.moments](optimizer)]
        beside += [] if self._buffers is None else [self._buffers]
        comparison = partial(Drift, fragments, beside)
        guarding = dataclasses.replace(guarding, comparison=comparison)
        super().__init__(configuration, parameters, group, roll_call, guarding)
        pieces = [piece for fragment in fragments for piece in fragment.pieces]
        of_pieces = {
            piece.name: {"shape": list(piece.shape), "dtype": str(piece.parameter.dtype), **part_of(piece.parameter)}
            for piece in pieces
        }
        self.averaged = dataclasses.replace(self.averaged, parameters=of_pieces)
        self._optimizer = optimizer
        self._trained = Trained(optimizer)
        self._steps_within = steps_within(optimizer)
        self._schedule = schedule
        self._fragments = fragments
        try:
            beginning = {"outer": described(outer), "broadcast": bool(broadcast)}
            lines = [f"{key}={value}" for key, value in {**schedule.describe(), **beginning}.items()]
            lines += groups_of(outer if isinstance(outer, Optimizer) else made)
            given = [] if buffers is None else list(buffers.named_buffers())
            lines += [f"buffer {name} with shape {tuple(each.shape)} and dtype {each.dtype}" for name, each in given]
            tensors = [*((name, local(each).detach()) for name, each in parameters), *given]
            transport = transport_for(group, self.engine.store.device)
            check_same(lines, transport, self.engine.store.device)
            if broadcast:
                send_first(tensors, transport)
            else:
                check_equal(tensors, transport, self.engine.store.device, REMEDY)
            self._pending = PendingAverages(fragments, beside, self.engine, self.wire)
        except Exception:
            self.close()
            raise
        for fragment in fragments:
            fragment.start()
        if self._buffers is not None:
            self._buffers.start()
        self.outer = adopted(outer, fragments) if isinstance(outer, Optimizer) else made
        self.steps_done = self._earlier = 0
        self._dense_bytes = self.engine.dense_bytes(sum(local(each).nbytes for _, each in parameters))
        self._periods = 0
        self._begin_period()
        self._hook = optimizer.register_step_post_hook(self._after_step)

    @property
    def due(self) -> bool:
        """Whether something is averaged or taken after the next local step."""
        return self.steps_done + 1 >= self._next

    @property
    def syncs(self) -> int:
        """Averages taken, each fragment's counted for itself."""
        return self._pending.taken

    @property
    def dropped(self) -> int:
        """Averages that were not taken because they were not finite."""
        return self._pending.dropped

    @as_on_the_wire()
    def synchronize(self) -> None:
        """Averages now whatever may differ between ranks, such as at the end of training.

        What is on its way is taken first. The averages are taken undelayed and unmixed, so that all ranks have the
        same parameters afterwards, also where some rank put other weights in their place, and a new period begins. So
        they have the same ``buffers``, also where forward passes changed them since the last step.
        With ``verify_every`` they compare what these averages left.

        Raises:
            ConfigurationError: If the optimizer has other parameters than when averaging began; or if one was frozen
                then and is not now, or, with an outer optimizer, the other way round.
            GradwireError: If ranks have taken different numbers of steps, or an earlier average failed.
            DivergenceError: On every rank, if ranks that verify do not have the same.
        """
        self._trained.check(moved=self.outer is not None)
        with self.wire.whole():
            now = self.steps_done
            self._compare(lambda: [in_step(now, self.engine.store.device)])
            self._pending.take_all(now)
            behind = self._behind(now)
            for fragment in behind:
                self._pending.launch(fragment, now, 0, 1.0, None if self._warm else self.outer)
            self._pending.take(now)
            first = self._fragments[0]
            if first not in behind and self._buffers is not None and self._buffers.averages(first):
                self._pending.average_beside(first, self._buffers, now)  # forward passes change them without any step
            for guard in self.engine.guards:
                if isinstance(guard, Drift):
                    self._compare(guard.compare)
            if now > self._began:
                self._begin_period()

    def stats(self) -> Stats:
        """Totals of this rank since the method was attached: ``steps`` are local ones, without those of a loaded state.

        ``dense_bytes`` is what a dense all-reduce of the gradients in every local step would have handed over.
        """
        taken = self.steps_done - self._earlier
        return dataclasses.replace(super().stats(), steps=taken, dense_bytes=taken * self._dense_bytes)

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs beside the model's and the optimizer's own state, to go on as if it had not stopped.

        Averages on their way are waited for and saved with it. Every rank has its own state; save it on each, with the
        model's, which differs between ranks in the middle of a period.
        """
        flights = self._pending.state()
        return {
            **super().state_dict(),
            "periodic": {
                "schedule": self._schedule.describe(),
                **{name: getattr(self, name) for name in _COUNTERS},
                **flights,
                "buffers": {} if self._buffers is None else copied(self._buffers.last.items()),
                "outer": None if self.outer is None else copy.deepcopy(self.outer.state_dict()),
            },
        }

    @as_on_the_wire()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from where :meth:`state_dict` was taken; the model's and the optimizer's state is for you to load.

        Raises:
            ConfigurationError: If the state is of another version, configuration, schedule or model; nothing is
                changed.
        """
        saved = state.get("periodic") if isinstance(state, Mapping) else None
        if not isinstance(saved, Mapping):
            raise ConfigurationError("the state is not of periodic averaging; load it where it was saved")
        check_form(state)
        for key in _KEPT:
            if key not in saved:
                raise ConfigurationError(f"the state's 'periodic' has no {key!r}; give all that state_dict() returned")
        ours: dict[str, object] = {**self._schedule.describe(), "outer": self.outer is not None}
        for key, value in {**saved["schedule"], "outer": saved["outer"] is not None}.items():
            if ours[key] != value:
                raise ConfigurationError(
                    f"the state was saved with {key}={value!r}, this handle has {key}={ours[key]!r}; "
                    "attach with the same"
                )
        kept = {} if self._buffers is None else self._buffers.last
        _check_shapes("buffers", {name: tuple(each.shape) for name, each in kept.items()}, saved["buffers"])
        _check_shapes("parameters", self.averaged.shapes, saved["anchors"])
        if self.outer is not None:
            check_saved(self.outer, saved["outer"])
        self._pending.wait()
        super().load_state_dict(state)
        self._earlier += saved["steps_done"] - self.steps_done
        for name in _COUNTERS:
            setattr(self, name, saved[name])
        self._pending.load(saved, self.outer)
        for name, last in kept.items():
            last.copy_(saved["buffers"][name])
        if self.outer is not None:
            self.outer.load_state_dict(copy.deepcopy(saved["outer"]))  # else it would step in the tensors given
        self._look_ahead()

    def _check_change(self, configuration: Settled) -> None:
        """As all handles do; stretches of the model are cut once."""
        if isinstance(configuration, Mixture):
            raise ConfigurationError("parameters are averaged periodically by one method; give one for all of them")
        granularity, cut_by = str(configuration.granularity), str(self.configuration.rules[0].granularity)
        if granularity != cut_by:  # whether owners have whole rows cuts no stretch
            raise ConfigurationError(
                f"granularity={granularity!r} cannot take the place of {cut_by!r}, by which the model was "
                "cut into stretches; close this handle and attach anew"
            )
        self._schedule.check(configuration, outer=self.outer is not None)
        super()._check_change(configuration)

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
        if self._steps_within and not is_whole(optimizer):
            return
        self.steps_done += 1
        if self.steps_done >= self._next:
            self._trained.check(moved=self.outer is not None)
            self.wire.check()
            with self.wire.whole():
                self._act()

    @as_on_the_wire()
    def _act(self) -> None:
        """Takes averages that are due, sends those whose turn it is, and begins a period when one has ended."""
        now, schedule = self.steps_done, self._schedule
        self._pending.take(now)
        step = now - self._began
        late = NEXT if schedule.eager else schedule.delay
        late, mix, outer = (0, 1.0, None) if self._warm else (late, schedule.mix, self.outer)
        for fragment in self._fragments:
            if step == schedule.due(fragment.number, self._length):
                self._pending.launch(fragment, now, late, mix, outer)
        self._pending.take(now)
        if step >= self._length:
            self._begin_period()
        self._look_ahead()

    def _behind(self, now: int) -> list[Fragment]:
        """Those that ranks may have otherwise: by local steps, or as some of them have been changed on some rank."""
        behind = [fragment.level < now for fragment in self._fragments]
        if not all(behind):
            mine = [before or fragment.moved() for before, fragment in zip(behind, self._fragments, strict=True)]
            behind.clear()
            self._compare(lambda: [on_any_rank(mine, behind, self.engine.store.device)])
        return [fragment for fragment, differs in zip(self._fragments, behind, strict=True) if differs]

    def _compare(self, begin: Callable[[], list[Synchronization]]) -> None:
        """Waits until all ranks have compared what ``begin`` says."""
        compared = self.wire.promise()
        self.wire.submit(begin, lambda: None, lambda: self.wire.keep(compared, torch.empty(0, dtype=torch.float32)))
        self.wire.wait(compared)

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
        coming = [*turns, *self._pending.dues, self._began + self._length]
        self._next = min(step for step in coming if step > self.steps_done)


def _check_shapes(what: str, ours: Mapping[str, tuple[int, ...]], saved: Mapping[str, Tensor]) -> None:
    theirs = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            raise ConfigurationError(
                f"of {what}, the state has {name!r} with shape {theirs.get(name)}, this handle with {ours.get(name)}; "
                "load a state saved from the same model"
            )
