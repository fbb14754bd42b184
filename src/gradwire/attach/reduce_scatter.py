"""The second way in for FSDP2: the reduce-scatter over shards, compressed as ZeRO++ does it.

FSDP calls what takes the reduce-scatter's place with a parameter group's unsharded gradient, and goes on when the shard
of its average is there. A residual would be as large as the unsharded gradient, which nobody has room for in a sharded
training; so methods without bias serve, which need none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.attach.fsdp import sharded_model
from gradwire.attach.given import check_left_out
from gradwire.attach.handle import Handle
from gradwire.attach.roll_call import RollCall
from gradwire.attach.torch_fsdp import ParameterGroup, ShardedModel
from gradwire.attach.wrappers import unwrapped_model
from gradwire.engine.choices import FUSE_BYTES, Choices
from gradwire.engine.configuration import Configuration
from gradwire.engine.guarding import Guarding
from gradwire.engine.mixture import Mixture, Settled
from gradwire.errors import ConfigurationError
from gradwire.layout import Block, Slot
from gradwire.memory import NONE
from gradwire.methods import CodecMethod, Method
from gradwire.policy import DensePolicy
from gradwire.randomness import key_of
from gradwire.routes import Operator, Shards, scattered, scattered_densely
from gradwire.wire import Synchronization


@dataclass(frozen=True, eq=False)
class _Part:
    """A parameter group in its gradient, and its shard in the average.

    Attributes:
        group: FSDP's.
        compressed: What the method takes.
        dense: What it does not.
    """

    group: ParameterGroup
    compressed: Shards | None
    dense: Shards | None

    @classmethod
    def of(cls, group: ParameterGroup, handle: Handle, names: dict[int, str]) -> _Part:
        rule, ranks, own = handle.configuration.rules[0], handle.engine.world_size, handle.engine.rank
        rows, offset = [list[Slot]() for _ in range(ranks)], 0
        for parameter, shape in zip(group.parameters, group.padded, strict=True):
            slot = Slot(names[id(parameter)], shape, offset)
            offset = slot.stop
            for rank, row in enumerate(rows):
                row.append(replace(slot, part=f"{rank} of {ranks}"))
        cut = []
        for taken in (True, False):
            kept = [[each for each in row if rule.compresses(each.shape) == taken] for row in rows]
            alone = Block.cut(kept[own], rule.granularity) if kept[own] else None
            moved = [
                [replace(each, offset=each.offset + rank * offset) for each in row] for rank, row in enumerate(kept)
            ]
            everyone = tuple(Block.cut(row, rule.granularity) for row in moved if row)
            cut.append(None if alone is None else Shards(everyone, everyone, alone))
        return cls(group, *cut)


class ReduceScatter(Handle):
    """What :func:`compress_reduce_scatter` gives back."""

    _replicas = False  # everybody has another shard

    def __init__(
        self,
        configuration: Configuration,
        model: ShardedModel,
        group: dist.ProcessGroup,
        roll_call: RollCall,
        name: str | None,
    ) -> None:
        _check_method(configuration)
        padded = {
            id(each): shape for part in model.groups for each, shape in zip(part.parameters, part.padded, strict=True)
        }
        named = [
            (name, nn.Parameter(torch.zeros((), dtype=torch.float32, device=each.device).expand(padded[id(each)])))
            for name, each in model.parameters
        ]
        super().__init__(configuration, named, group, roll_call, Guarding(Choices(rollback=False, name=name)))
        self._number = dist.get_rank()  # replicas of a shard draw other numbers
        self._model = model
        for part in [_Part.of(each, self, model.names) for each in model.groups]:
            part.group.scatter_by(partial(self._scatter, part))
        model.fail_as_the_wire_does()
        model.at_end_of_backward(self._end)

    def _scatter(self, part: _Part, gradient: Tensor, average: Tensor) -> None:
        engine, wire = self.engine, self.wire
        check_left_out(self._model.frozen)
        part.group.check_policy()
        part.group.check_whole(average.numel())
        if not engine.under_way:
            self._model.check_outermost()
            engine.before_step()
        exact = gradient.float()
        reduced = average if average.dtype == torch.float32 else torch.empty_like(average, dtype=torch.float32)

        def begin() -> list[Synchronization]:
            engine.meter.scattered(gradient.nbytes, engine.world_size)
            engine.under_way = True
            (rule,) = self.configuration.at(engine.step).rules
            asked = [] if part.dense is None else [scattered_densely(part.dense, exact, reduced)]
            if part.compressed is not None and isinstance(rule.method, CodecMethod):
                worker = Operator(rule.method.codec(), NONE, key_of(rule.seed, engine.step, self._number))
                asked.append(scattered(worker, part.compressed, exact, reduced))
            return asked

        with wire.whole():
            landed = wire.promise()
            wire.submit(begin, lambda: wire.keep(landed, reduced), lambda: None)  # FSDP waits: nothing to fuse with
            wire.wait(landed)
        if (factor := part.group.factors[0]) != 1:
            reduced.mul_(factor)
        if reduced is not average:
            average.copy_(reduced)

    def _end(self) -> None:
        """Ends the step, if one of its gradients was reduced."""
        if self.engine.under_way:
            with self.wire.whole():
                ended = self.wire.promise()
                self.engine.end_step(self.wire, lambda: self.wire.keep(ended, torch.empty(0)))
                self.wire.wait(ended)

    def _check_change(self, configuration: Settled) -> None:
        """As all handles do; gradients are cut once, and by a method without bias."""
        if isinstance(configuration, Mixture):
            raise ConfigurationError("a reduce-scatter is compressed by one method; give one for all parameters")
        _check_method(configuration)
        if configuration.granularity != self.configuration.rules[0].granularity:
            raise ConfigurationError(
                f"granularity={str(configuration.granularity)!r} cannot take the place of the one by which gradients "
                "were cut; shard the model and attach anew"
            )
        super()._check_change(configuration)


def _check_method(configuration: Configuration) -> None:
    method = configuration.method
    alone = type(method).synchronize is CodecMethod.synchronize  # nothing is learnt beside what a codec writes
    unbiased = isinstance(method, CodecMethod) and method.bias == "unbiased" and not method.codec().news_bytes
    if not (unbiased and alone) or configuration.route != "sharded" or configuration.owner is not None:
        raise ConfigurationError(
            f"{configuration} cannot reduce over shards: without a memory, which would be as large as the unsharded "
            "gradient, a method must be unbiased, and nobody compresses again; choose qsgd, nuqsgd, sdp4bit, natural, "
            "terngrad or dithered"
        )


def compress_reduce_scatter(
    model: nn.Module,
    method: str | Method,
    *,
    granularity: str | None = None,
    dense: DensePolicy | None = None,
    seed: int = 0,
    fuse_bytes: int = FUSE_BYTES,
    name: str | None = None,
    **options: Any,
) -> Handle:
    """Reduces the gradients of an FSDP2 model over its shards through an unbiased method from now on.

    To be called on every rank, on the outermost module, when all of it went through ``fully_shard``, before the first
    backward pass. What FSDP does over replicas stays, and :func:`gradwire.compress` may compress that, too.

    Args:
        model: The sharded model.
        method: A name or a method object, of a codec method without bias: ``"qsgd"``, ``"sdp4bit"``, ``"natural"``,
            ``"terngrad"``, ``"nuqsgd"``, ``"dithered"``. It has no memory.
        granularity: As in :func:`gradwire.compress`.
        dense: Which shards of parameters go without compression; by default 1-D ones and those below 1,024 elements.
        seed: Where all randomness starts; every rank and every shard has numbers of its own.
        fuse_bytes: As in :func:`gradwire.compress`.
        name: As there; nothing else tells models of one shape apart, whatever their values, as no two ranks have the
            same shard.
        **options: The method's hyper-parameters, values or schedules.

    Returns:
        A handle. Its counters hold what is sent against FSDP's own reduce-scatter.

    Raises:
        ConfigurationError: If anything cannot be as asked, or differs between ranks; the model stays as it was.

    Example:
        >>> from torch.distributed.fsdp import fully_shard
        >>> scatter = gradwire.compress_reduce_scatter(fully_shard(net), "qsgd", bits=8)
        >>> scatter.close()
    """
    inner = unwrapped_model(model) if isinstance(model, nn.Module) else model
    sharded = sharded_model(inner) if isinstance(inner, nn.Module) else None
    if sharded is None:
        raise ConfigurationError(
            f"model is a {type(model).__name__} that did not go through fully_shard, so nothing of it is "
            "reduce-scattered; use gradwire.compress"
        )
    group = sharded.shards()
    with RollCall(group) as roll_call:
        if "inside" in options:
            raise ConfigurationError(
                f"inside={options['inside']!r} is for averages over replicas, and here everybody has another shard; "
                "leave it out, or shard within nodes and give the averages between them to gradwire.compress"
            )
        choices = Choices(
            granularity=granularity, route="sharded", memory="none", dense=dense, seed=seed, fuse_bytes=fuse_bytes
        )
        return ReduceScatter(Configuration.of(method, options, choices), sharded, group, roll_call, name)
