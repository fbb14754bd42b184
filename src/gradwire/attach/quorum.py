"""Averages among workers of whom some go and others come: an engine and a wire for each group that they form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.attach.apart import take_apart
from gradwire.attach.averaged import Averaged
from gradwire.attach.buckets import Buckets
from gradwire.attach.given import check_left_out, check_named, check_parameters
from gradwire.attach.rehearsal import rehearse_all
from gradwire.attach.shards import is_sharded
from gradwire.attach.synchronizer import check_dense
from gradwire.attach.tree import Tree
from gradwire.engine import Methods, Stats
from gradwire.engine.agreement import check_agreement
from gradwire.engine.automatic import Automatic
from gradwire.engine.change import lasting
from gradwire.engine.choices import Choices
from gradwire.engine.configuration import Configuration
from gradwire.engine.engine import Engine
from gradwire.engine.guarding import Guarding
from gradwire.engine.guards import Unused
from gradwire.engine.mixture import Settled, configure
from gradwire.engine.unit import Unit
from gradwire.errors import ConfigurationError
from gradwire.layout import Slot
from gradwire.memory import OWED, Kind, NoMemory, Snapshot
from gradwire.policy import DensePolicy
from gradwire.state.form import Ranks
from gradwire.wire import Meter, ProcessGroupTransport, Wire
from gradwire.wire.meter import marks_of
from gradwire.wire.wire import TensorFuture

CPU = torch.device("cpu")


class Averages:
    """A method's averages over groups that change.

    Args:
        method: As in :func:`gradwire.compress`.
        options: Its hyper-parameters, and the choices of :func:`gradwire.compress` but for ``inside``.
        parameters: Whose gradients :meth:`synchronize` averages, a module or names and parameters; None if only
            :meth:`average` is called.

    Attributes:
        averaged: The parameters, and the group that is.
        engine: That group's.
        wire: That group's.

    Raises:
        ConfigurationError: If anything cannot be as asked.
    """

    averaged: Averaged
    engine: Engine
    wire: Wire

    def __init__(
        self,
        method: Methods,
        options: Mapping[str, Any],
        parameters: nn.Module | Iterable[tuple[str, nn.Parameter]] | None,
    ) -> None:
        known = {each.name for each in fields(Choices)}
        chosen = {name: value for name, value in options.items() if name in known}
        if parameters is None:
            chosen.setdefault("dense", DensePolicy(vectors=False))  # what has no name may be a whole bucket
        choices = Choices(**chosen)
        rest = {name: value for name, value in options.items() if name not in known}
        configuration = configure(method, rest, choices)
        if isinstance(configuration, Automatic) or choices.inside is not None:
            raise ConfigurationError("method='auto' and inside= are for workers that stay; leave them out")
        self._tree = Tree(parameters) if isinstance(parameters, nn.Module) else None
        given = [] if parameters is None else check_named(self._tree.named_parameters() if self._tree else parameters)
        self._named = [(name, each) for name, each in given if each.requires_grad]
        self._frozen = [(name, each) for name, each in given if not each.requires_grad]
        self._configuration, self._guarding = configuration, Guarding(choices)
        if parameters is None:
            _check_nameless(configuration, self._guarding)
        else:
            check_parameters(self._named)
            configuration.check_names([name for name, _ in self._named])
        if any(is_sharded(each) or each.device != CPU for _, each in self._named):
            raise ConfigurationError("there are DTensors or parameters on a GPU, which were not tried in such groups")
        self._guarding.check(configuration)
        rehearse_all(configuration, CPU)
        self._healed = False
        self._meter = Meter(mark=marks_of(CPU))
        self._group: dist.ProcessGroup | None = None
        self._share = 0
        self._began: int | None = None
        self._units: dict[tuple[int, tuple[int, ...]], Unit] = {}
        self._arrived = 0

    def stats(self) -> Stats:
        """Totals over all groups."""
        meter = self._meter
        return Stats(meter.steps, meter.dense_bytes, meter.wire_bytes, dict(meter.seconds))

    def heal(self, state: object = None) -> None:
        """Told that this worker has taken over another's model, to which it owes nothing; before the next group."""
        self._healed = True

    def meet(self, group: dist.ProcessGroup, share: int, step: int, timeout: timedelta) -> None:
        """Goes on in a group, which may be the one that was.

        Args:
            group: The workers; torch need not know of it.
            share: How many of them take part, the others with zeros.
            step: Of the training, which is how many were committed.
            timeout: How long a collective may take.

        Raises:
            ConfigurationError: If the workers' choices or parameters differ.
            WireError: If one of them is gone.
        """
        if self._began is not None and step != self._began + 1:
            self.wire.close()  # its thread may be at what failed
            self._snapshot.restore()
            self._group = None
        self._began = None
        if (group, share) != (self._group, self._share):
            self._form(group, share, timeout)
        self.engine.begin(max(step, self.engine.step) if self._units else step)

    def _form(self, group: dist.ProcessGroup, share: int, timeout: timedelta) -> None:
        kept = [] if self._share == 0 or self._healed else self._lasting(share / self._share)
        if self._share:
            self.wire.close()
        transport = ProcessGroupTransport(group, timeout)
        described = self._guarding.describe(self._configuration)
        check_agreement(self._configuration, self._named, transport, CPU, described)
        self._group, self._share, self._healed = group, share, False
        ranks = Ranks(range(transport.world_size))
        self.averaged = Averaged(Averaged.described(self._named), transport.rank, ranks, None)
        self.engine = Engine(self._configuration, transport.rank, transport.world_size, CPU)
        self.engine.meter = self._meter
        for each in kept:
            self.engine.store.put(*each)
        self._unused = Unused(self.engine.give_back, ask=False)
        self.engine.guards += [*self._guarding.guards(self.engine, self._named), self._unused]
        self.wire = Wire(transport, self._meter, self._configuration.fuse_bytes, CPU, self.engine.later)
        self._units, self._arrived = {}, 0
        if self._named:
            self._buckets = Buckets(self)
            self._flats = [torch.zeros(unit.numel, dtype=torch.float32) for unit in self._buckets.units]
        self._snapshot = Snapshot(self.engine.store)

    def _lasting(self, weight: float) -> list[tuple[str, str, Tensor, Kind]]:
        """What goes on in another group; of what is owed so much that the mean over those who take part stays."""
        engine = self.engine
        kept = lasting(engine.store, self.averaged.slots, engine.now, engine.rank, engine.world_size, None)
        return [(field, name, weight * value if field == OWED else value, kind) for field, name, value, kind in kept]

    def synchronize(self, takes_part: bool) -> None:
        """Averages the gradients of all parameters, in place; those of a worker that takes no part count as zero.

        So do those of parameters that require none any more, whose ``grad`` is left alone.

        Raises:
            ConfigurationError: If a gradient is sparse, or the module has other parameters than it had; nothing is
                changed.
            WireError: If a collective fails.
        """
        check_left_out(self._frozen)
        if self._tree is not None:
            self._tree.check()
        trained = {name: each for name, each in self._named if each.requires_grad}
        take_apart(each for _, each in self._named)
        gradients = {name: each.grad for name, each in trained.items() if each.grad is not None}
        check_dense(gradients)
        for each in trained.values():
            if each.grad is None:
                each.grad = torch.zeros_like(each, dtype=each.grad_dtype or each.dtype)
        self._unused.names = self.averaged.shapes.keys() - trained
        self._snapshot.take()
        self._began = self.engine.step
        weight = self.engine.world_size / self._share

        def take(name: str, average: Tensor) -> None:
            if name in trained:
                trained[name].grad.copy_(average if weight == 1 else average.mul_(weight))  # type: ignore[union-attr]

        views = self._buckets.views(self._flats)
        self._buckets.average(self._flats, views, gradients if takes_part else {}, take)

    def average(self, tensor: Tensor) -> TensorFuture:
        """Queues the average of a tensor of which nothing is remembered, in place."""
        engine, wire, weight = self.engine, self.wire, self.engine.world_size / self._share
        key = (self._arrived, tuple(tensor.shape))
        if key not in self._units:
            self._units[key] = engine.unit([Slot(f"tensor {key[0]} of {key[1]}", key[1], 0)])
        self._arrived += 1
        landed, unit, flat = wire.promise(otherwise=tensor), self._units[key], tensor.float().reshape(-1)

        def hand_on() -> None:
            tensor.copy_(flat.mul_(weight).view_as(tensor))
            wire.keep(landed, tensor)

        engine.average(wire, lambda: unit, flat, hand_on=hand_on, counted=tensor.nbytes)
        return landed

    def wait(self, landed: TensorFuture) -> None:
        """Waits for an average, and ends the step of all that were queued.

        Raises:
            WireError: If a collective fails.
            GradwireError: If one has failed before.
        """
        if self._arrived:
            self._arrived = 0
            self.engine.end_step(self.wire)
        self.wire.wait(landed)

    def settle(self) -> None:
        """Waits for all that was queued, so that others may use the group."""
        if self._group is not None and self._arrived:
            self._arrived = 0
            self.engine.end_step(self.wire)
            self.wire.call(lambda: None)

    def close(self) -> None:
        """Ends the wire's thread."""
        if self._share:
            self.wire.close()


def _check_nameless(configuration: Settled, guarding: Guarding) -> None:
    """Raises ConfigurationError if something would be remembered of tensors, or should be."""
    alone = configuration if isinstance(configuration, Configuration) else None
    if alone is None or not isinstance(alone.memory, NoMemory) or alone.method.bias not in ("exact", "unbiased"):
        raise ConfigurationError(
            f"{configuration} remembers by parameter, and what is to be averaged has no names; give parameters=model "
            "and call synchronize(), or choose qsgd, nuqsgd, natural, terngrad or bf16"
        )
    choices = guarding.choices
    if guarding.rolls_back(configuration) or choices.clip_spikes is not None or choices.audit_every:
        raise ConfigurationError(
            "rollback, which a grad_scaler brings along, clip_spikes and audit_every go by parameter, and what is to "
            "be averaged has no names; give parameters=model and call synchronize(), or leave them out"
        )
