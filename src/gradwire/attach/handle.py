"""What an attachment gives back: counters, state, and a description of itself.

State is read and written on the wire's thread, after all that was submitted and never within a step, and is loaded only
when all of it fits.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from gradwire.attach.averaged import Averaged
from gradwire.attach.given import Named, check_backend, check_parameters
from gradwire.attach.lines import left_if_refused, line_to
from gradwire.attach.rehearsal import rehearse_all
from gradwire.attach.roll_call import RollCall
from gradwire.attach.shards import Agreement, check_replicas, cut_groups, local_parameters
from gradwire.attach.trial import Decision, Trial, check_trial
from gradwire.attach.twins import tell_of_twins
from gradwire.attach.uncopied import Uncopied
from gradwire.codecs.codec import Codec
from gradwire.engine import agreement
from gradwire.engine.agreement import check_agreement, check_equal, check_same_step
from gradwire.engine.automatic import Automatic
from gradwire.engine.change import forgotten
from gradwire.engine.choices import Choices
from gradwire.engine.engine import Engine
from gradwire.engine.guarding import Guarding
from gradwire.engine.guards import Audit, Auditor
from gradwire.engine.guards.audit import ScalarWriter, write
from gradwire.engine.guards.rollback import Rollback
from gradwire.engine.mixture import Configured, Methods, Settled, reconfigured
from gradwire.engine.nodes import Nodes
from gradwire.engine.stats import Stats
from gradwire.errors import ConfigurationError, GradwireError
from gradwire.kernels import by_reference
from gradwire.layout import GRADIENT_DTYPES
from gradwire.memory import Memory
from gradwire.state.form import VERSION, Ranks, check_form
from gradwire.surroundings import as_on_the_wire
from gradwire.wire import Wire, transport_for
from gradwire.wire.sibling import sibling_of
from gradwire.wire.transport import timeout_of

REMEDY = (
    "give all of them rank 0's by torch.distributed.broadcast, and attach several models in the same order everywhere"
)


class Handle(Uncopied):
    """An attached method.

    Args:
        configuration: All choices.
        parameters: Names and parameters to average gradients of, in the model's order; of a DTensor this rank's part.
        group: The workers, of whom the handle makes a group of its own, so that collectives cannot mix with others'.
        roll_call: Of this attachment: what a rank raises within is told to all.
        guarding: What is done around every average; nothing if None.

    Attributes:
        averaged: What it averages, and among whom.
        attached: Whether it can average; not any more once it is closed.
        buckets: Names of the parameters that came together in the last step; empty where the gradients' owner forms
            buckets by a rule of its own.
    """

    attached = False
    _replicas = True
    """Whether parameters must have the same values on all ranks when the method is attached."""

    @as_on_the_wire()
    def __init__(
        self,
        configuration: Configured,
        parameters: Named,
        group: dist.ProcessGroup,
        roll_call: RollCall,
        guarding: Guarding | None = None,
    ) -> None:
        check_parameters(parameters, GRADIENT_DTYPES)
        configuration.check_names([name for name, _ in parameters])
        check_backend(group, parameters[0][1].device)
        check_replicas(parameters, group)
        guarding = guarding or Guarding(Choices(rollback=False))
        guarding.check(configuration)
        device = parameters[0][1].device
        ranks = dist.get_process_group_ranks(group)
        self._nodes = None if configuration.inside is None else configuration.inside.of(ranks)
        if self._nodes is not None:
            configuration = configuration.on(self._nodes)
        rehearse_all(configuration, device, aloud=group.rank() == 0)
        self._trial = Trial.of(configuration, parameters) if isinstance(configuration, Automatic) else None
        self.averaged = Averaged(Averaged.described(parameters), group.rank(), Ranks(ranks), self._nodes)
        cuts = cut_groups(parameters) if guarding.rolls_back(configuration) else []
        parameters = local_parameters(parameters)
        self.buckets: tuple[tuple[str, ...], ...] = ()
        if len(configuration.rules) > 1 or len(configuration.stages) > 1:
            self.averaged.check_stages(configuration)
        self.averaged.check_room(configuration, device, 2 if guarding.rolls_back(configuration) else 1)
        roll_call.ready()
        sibling = sibling_of(group, device)
        transport = transport_for(sibling, device, timeout_of(group))
        with left_if_refused(transport):
            check_agreement(configuration, parameters, transport, device, guarding.describe(configuration))
            if self._replicas:
                values = check_equal(parameters, transport, device, REMEDY)
                tell_of_twins(sibling, guarding.choices.name, parameters, values)
        guarding = replace(guarding, agree=Agreement([sibling_of(each, device) for each in cuts]) if cuts else None)
        self.engine = Engine(configuration, transport.rank, transport.world_size, device, self._nodes)
        self._guarding = guarding
        self.engine.guards += guarding.guards(self.engine, parameters)
        self._auditor = next((each for each in self.engine.guards if isinstance(each, Auditor)), None)
        checked = bool(guarding.choices.verify_every)
        line = self._transport = line_to(group, transport, device, self._nodes, self.engine.meter, checked)
        self.wire = Wire(line, self.engine.meter, configuration.fuse_bytes, device, self.engine.later)
        self._sibling = weakref.ref(sibling)  # whose threads end when the transport lets go of it
        self.attached = True
        if self._trial is not None:
            self.engine.guards.insert(0, self._trial)
            self.reconsider()

    @property
    def configuration(self) -> Configured:
        """All choices, as they are now."""
        return self.engine.configuration

    @property
    def advice(self) -> Decision | None:
        """What ``"auto"`` chose, why, and what it measured; None until it has, and where a method was given."""
        return None if self._trial is None else self._trial.decision

    def reconsider(self) -> None:
        """Has ``"auto"`` measure and choose anew, beginning with dense averages, the first of which takes what is owed.

        To be called as :meth:`pause` is, and raises what that raises; and a ConfigurationError if a method was given.
        """
        trial = check_trial(self._trial)
        self._agree("reconsider")
        self.wire.call(lambda: trial.begin(self.engine, self._transport))

    def pause(self) -> None:
        """From the next step on averages are dense, as ``"dense"`` makes them, until :meth:`resume`.

        What the method remembers stays as it is, and of the steps in between it knows nothing. To be called on every
        rank between the same two steps; it waits for the others. A state keeps whether its handle was paused.

        Raises:
            ConfigurationError: On every rank, if one does not call it, or calls it between other steps; nothing is
                changed.
            GradwireError: If a step is under way or failed.

        Example:
            >>> handle.pause(); handle.paused
            True
            >>> handle.resume(); handle.paused
            False
        """
        self._agree("pause")
        self.wire.call(self.engine.pause)

    def resume(self) -> None:
        """The method goes on with what it remembers from before :meth:`pause`, under the same conditions."""
        self._agree("resume")
        self.wire.call(self.engine.resume)

    @property
    def paused(self) -> bool:
        """Whether averages are dense until :meth:`resume`."""
        return self.engine.paused

    def _agree(self, do: str) -> None:
        """Finds that all ranks do the same between the same two steps."""
        with self._between_steps(do) as roll_call:
            roll_call.ready()
        device = self.engine.store.device
        self.wire.call(lambda: check_same_step(self.engine.step, do, self._transport, device))

    @contextmanager
    def _between_steps(self, do: str) -> Iterator[RollCall]:
        """In it this rank finds out whether it can do what all are to do between two steps, and says so."""
        group = self._sibling()
        if group is None or not self.attached:
            raise GradwireError(f"the handle was closed, and there is nothing to {do}; attach again")
        with RollCall(group, do) as roll_call:
            self.wire.call(self._check_between_steps)
            yield roll_call

    def change(
        self,
        method: Methods | None = None,
        *,
        granularity: str | None = None,
        route: str | None = None,
        memory: str | Memory | None = None,
        owner: str | Codec | None = None,
        **options: Any,
    ) -> None:
        """From the next step on the method has other options, or is another one.

        To be called on every rank between the same two steps, with the same arguments; it waits for the others. What is
        remembered goes on where the memory is of the same kind; where it is not, the next step takes along what is
        owed, and what else was remembered is forgotten, which a warning says. Factors of low rank keep their first
        rows, or get further ones as they begin.

        Args:
            method: As in :func:`gradwire.compress`, with its own options and choices; None for the same one, whose
                options and choices stay what they are where none are given.
            granularity: As in :func:`gradwire.compress`; ``"model"`` can be neither begun nor ended.
            route: See there.
            memory: See there; ``"ef21"`` and ``"diana"`` can be begun where ``rollback`` is on.
            owner: See there.
            **options: The method's hyper-parameters, values or schedules.

        Raises:
            ConfigurationError: On every rank, if one does not call it, calls it otherwise or between other steps, or
                something cannot be as asked; nothing is changed.
            GradwireError: If a step is under way or failed.

        Example:
            >>> handle.change(ratio=0.001)
            >>> handle.change("acpsgd", rank=8)
        """
        choices = replace(
            self._guarding.choices, granularity=granularity, route=route, memory=memory, owner=owner
        )  # and those that cannot be changed as they are
        with self._between_steps("change") as roll_call:
            configuration = reconfigured(self.configuration, choices, method, options, self.engine.world_size)
            if self._nodes is not None:
                configuration = configuration.on(self._nodes)
            self._check_change(configuration)
            rehearse_all(configuration, self.engine.store.device, aloud=self.engine.rank == 0)
            roll_call.ready()
        slots, device = self.averaged.slots, self.engine.store.device
        lines = [f"change after step {self.engine.step}"]
        lines += [f"{key}={value}" for key, value in configuration.describe().items()]

        def change() -> None:
            agreement.check_same(
                lines, self._transport, device, "change to the same on all ranks, between the same two steps"
            )
            if self.engine.rank == 0:
                for sentence in forgotten(self.engine.now, configuration, slots, self._nodes):
                    logging.getLogger("gradwire").warning("%s", sentence)
            self.engine.change(configuration, slots)

        self.wire.call(change)

    def _check_change(self, configuration: Settled) -> None:
        """Raises ConfigurationError if this handle cannot go on by other choices."""
        configuration.check_names(list(self.averaged.shapes))
        self._guarding.check(configuration)
        if configuration.whole != self.configuration.whole:
            raise ConfigurationError(
                "granularity='model' collects whole gradients, for which there must be room from the beginning; close "
                "this handle and attach anew"
            )
        rolls_back = any(isinstance(guard, Rollback) for guard in self.engine.guards)
        if self._guarding.rolls_back(configuration) and not rolls_back:
            raise ConfigurationError(
                f"{configuration} takes back steps that are not finite, and this handle was attached without; attach "
                "with rollback=True"
            )
        self.averaged.check_stages(configuration)

    def stats(self) -> Stats:
        """Totals of this rank since the method was attached."""
        meter, audit = self.engine.meter, None if self._auditor is None else self._auditor.newest()
        return Stats(
            meter.steps, meter.dense_bytes, meter.wire_bytes, dict(meter.seconds), audit, meter.node.wire_bytes
        )

    def audits(self) -> list[Audit]:
        """Compressed averages held against dense ones, as ``audit_every`` asked for; the newest 1,000."""
        return [] if self._auditor is None else self._auditor.audits()

    def write(self, writer: ScalarWriter, *, layers: bool = False) -> None:
        """Writes the counters as they are, and all audits since the last call, to TensorBoard.

        Counters are at ``stats().steps``; an audit is at its own step, and written again where that was taken anew.

        Args:
            writer: A ``torch.utils.tensorboard.SummaryWriter``, or whatever else has its ``add_scalar``.
            layers: Whether every parameter's audit is written, too.
        """
        stats = self.stats()
        for name, number in stats.as_dict("gradwire/").items():
            writer.add_scalar(name, number, stats.steps)
        for audit in () if self._auditor is None else self._auditor.news():
            write(writer, audit, layers)

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs to go on as if it had not stopped: tensors and plain values, by parameter name.

        Every rank has its own; save it on each, between two steps. ``torch.load(weights_only=True)`` reads it;
        :class:`gradwire.PerRank` is for ``torch.distributed.checkpoint``, :func:`gradwire.redistribute` for another
        number of workers. The form is documented in ``state/form.py``.

        A run that goes on from it in a new process gives the same bits, provided that DDP had its final buckets: it
        forms them after its first backward pass (its second with ``static_graph=True``). Before that, averages are the
        same up to the rounding of sums whose order depends on buckets, and up to what a method chooses by bucket.

        Raises:
            GradwireError: If some of a step's gradients have been taken in and others not yet, or a step failed.
        """
        return self.wire.call(self._state)

    def _state(self) -> dict[str, Any]:
        self._check_between_steps()
        return {
            "version": VERSION,
            **self.averaged.identity(self.configuration),
            **self.engine.saved(self.averaged.slots),
            "buckets": [list(names) for names in self.buckets],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from where :meth:`state_dict` was taken, between two steps.

        Raises:
            ConfigurationError: If the state is malformed, or of another version, configuration, model, rank or number
                of workers; nothing is changed.
            GradwireError: If a step is under way or failed.
        """
        self.wire.call(lambda: self._load(state))

    def _load(self, state: Mapping[str, Any]) -> None:
        self._check_between_steps()
        check_form(state)
        own, saved = self.configuration, self.configuration.as_saved(state["configuration"])
        self.averaged.check(state, saved)
        if isinstance(saved, Automatic):
            self.engine.adopt(saved)
            check_trial(self._trial).go_on(saved)
        else:
            self.engine.change(saved)
        self.engine.go_on(state["step"], state["dense_steps"], paused=state["paused"])
        self.engine.store.load(state["tensors"], state["kinds"])
        if not isinstance(own, Automatic) and saved is not own:
            self.engine.change(own, self.averaged.slots)
            if self.engine.rank == 0:
                logging.getLogger("gradwire").warning("the run was averaged by %s; what it owes goes along", saved)
        self.buckets = tuple(tuple(names) for names in state["buckets"])

    def _check_between_steps(self) -> None:
        if self.engine.under_way:
            raise GradwireError(
                "a step is under way: some of its gradients have been taken in, others not yet; save, load, pause and "
                "resume between backward passes"
            )

    def close(self) -> None:
        """Ends the wire's thread and process group; no gradients can be averaged through this handle any more.

        A handle that is not needed any more does so by itself, and so does one that is left when the interpreter exits.
        """
        if self.attached:
            self.attached = False
            self.wire.close()
            self._guarding.close()

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        name = f"{self._guarding.choices.name}: " if self._guarding.choices.name else ""
        shapes, rule = self.averaged.shapes, self.configuration.rule
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        dense = [name for name, shape in shapes.items() if rule(name).in_full(shape)]
        count, elements, left = len(sizes) - len(dense), sum(sizes.values()), sum(sizes[name] for name in dense)
        return (
            f"gradwire.Handle({name}{self.configuration}; {_workers(self.engine.world_size, self._nodes)}; "
            f"compressed: {count} tensors, {elements - left:,} elements; "
            f"averaged densely: {len(dense)} tensors, {left:,} elements"
            f"{_run_by_reference(self.engine.store.device)})"
        )


def _workers(count: int, nodes: Nodes | None) -> str:
    workers = "1 worker" if count == 1 else f"{count} workers"
    return workers if nodes is None else f"{workers} on {nodes}"


def _run_by_reference(device: torch.device) -> str:
    """What runs slowly on a device, if anything does."""
    slow = by_reference(device)
    return f"; by the reference on {device.type}, slowly: {', '.join(slow)}" if slow else ""
