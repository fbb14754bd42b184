"""What every published method is: hyper-parameters, a citation, and what it does with a gradient.

A method declares what theory says of it: unbiased or contractive, a bound of its error, its size as a formula. Tests
hold every name of the catalogue to it, and ``docs/methods.md`` is made from the same data.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gradwire import routes as ways
from gradwire.codecs.codec import Codec, LinearCodec
from gradwire.errors import ConfigurationError
from gradwire.granularity import Granularity
from gradwire.layout import Block, Slot
from gradwire.memory import BUILT_IN, NONE, Feedback, Kind, Memory, Remainder, Store
from gradwire.methods.published import Published
from gradwire.plain import Plain
from gradwire.policy import DensePolicy
from gradwire.randomness import SHARED, key_of
from gradwire.routes import Operator, Route, Shards, allreduce, sharded
from gradwire.wire.requests import Synchronization

Bias = Literal["exact", "unbiased", "contractive", "biased"]
"""What a method's averages are to the mean."""


@dataclass(frozen=True, eq=False)
class Context:
    """Where a method works: one block, on one rank.

    Attributes:
        block: Which elements of the flat gradient buffer.
        numel: Elements of that buffer.
        store: Where tensors are kept from step to step.
        memory: The memory chosen, fitted to the method's error bound there.
        route: The route chosen, one of the method's.
        owner: What the average is compressed with again; None for the method's own.
        rank: This worker.
        world_size: Number of workers.
        seed: Where all randomness starts, the same on every rank.
        granularity: Where the block's segments end.
    """

    block: Block
    numel: int
    store: Store
    memory: Memory
    route: str
    owner: Codec | None
    rank: int
    world_size: int
    seed: int
    granularity: Granularity

    def feedback(self) -> Feedback:
        """This worker's memory of the block."""
        return self._feedback

    @cached_property
    def _feedback(self) -> Feedback:
        return self._fitting(self.memory.feedback(self.store, "residual", self.block.slots, self.numel), self.numel)

    def key(self, step: int) -> int:
        """Randomness of this rank in a step."""
        return key_of(self.seed, step, self.rank)

    def owner_key(self, step: int) -> int:
        """Randomness of this rank in a step, as an owner of a shard."""
        return key_of(self.seed, step, self.world_size + self.rank)

    def owner_feedback(self, slots: Sequence[Slot], numel: int) -> Feedback:
        """An owner's memory of the averages in a buffer of its own; on the gather route all own everything."""
        kind = Kind.OWNED if self.route == "sharded" else Kind.SHARED
        return self._fitting(self.memory.owner().feedback(self.store, "owner_residual", slots, numel, kind), numel)

    def _fitting(self, feedback: Feedback, numel: int) -> Feedback:
        """What a memory made, if kernels, which rely on it, can write to its residual."""
        made: object = feedback
        residual = made.residual if isinstance(made, Feedback) else None
        flat = residual is None or (residual.dtype == torch.float32 and residual.shape == (numel,))
        if isinstance(made, Feedback) and flat and (residual is None or residual.is_contiguous()):
            return made
        given = type(made).__name__ if residual is None else f"a residual of {residual.dtype}, {tuple(residual.shape)}"
        raise ConfigurationError(
            f"{type(self.memory).__name__}.feedback gave {given}; give a Feedback with float32[{numel}] without gaps, "
            "such as store.flat(field, slots, numel, kind)"
        )

    def shared_key(self, step: int) -> int:
        """Randomness that all ranks share in a step."""
        return key_of(self.seed, step, SHARED)


class Method(Plain, ABC):
    """A compressed average. Subclasses are frozen dataclasses whose fields are the paper's hyper-parameters.

    What theory says of a method is data, which tests hold against what is measured.

    Attributes:
        citation: Authors, year, arXiv id.
        routes: The routes it can take, its usual one first.
        granularities: The scopes of segments it can have, its usual one first, with its size if that is ``"block:N"``.
        why_granularity: Why it has no other granularities, where it has not all.
        memory: Its usual memory: a name, or a memory object.
        memories: Names of the memories it can carry.
        whole_rows: Whether an owner's share is of whole rows, ``parameter[i]``, where there are as many as owners.
        dense: What it leaves to dense averages unless told otherwise.
        takes_all: Whether small and 1-D tensors are its business, too, whatever the policy; so where its average is no
            mean, since they would train at another learning rate.
        published: What ``preset="paper"`` takes, and what else of the publication is otherwise here or not at all.
        why_no_mean: Why its averages of gradients that stay do not tend to their mean, whatever the memory, if so.
        rolls_back: Whether a step that is not finite is taken back unless ``rollback=False``; so where it does not keep
            such values out of what it remembers itself.
        owed: The store's fields, beside its memory's, that hold what was not sent, in units of the gradient.
        bias: ``"unbiased"``, ``E Q(x) = x`` without a memory; ``"contractive"``, ``E |x - Q(x)|^2 < |x|^2``;
            ``"exact"`` up to rounding; or ``"biased"``, none of these.
        wire_bits: Bits that a segment takes there and back on the usual route, at most, or a layer's segments where the
            usual granularity is blocks: what a worker writes in all rounds, and on the sharded route what the owners of
            its shares write of the average; where it follows the data, with the room of a first step. A formula of
            ``d`` elements, or of ``n`` and ``m`` for a matrix, of ``k = max(1, round(ratio * d))``, of the number of
            ``workers`` and of the method's fields, in Python.
        learning_bits: The same of steps, the first of all among them, in which it learns what others use, if any.
    """

    citation: ClassVar[str] = ""
    routes: ClassVar[tuple[str, ...]]
    granularities: ClassVar[tuple[str, ...]] = ("layer", "bucket", "model", "block")
    why_granularity: ClassVar[str] = ""
    whole_rows: ClassVar[bool] = False
    memory: ClassVar[str | Memory] = "none"
    memories: ClassVar[tuple[str, ...]] = ("none", "residual")
    dense: ClassVar[DensePolicy] = DensePolicy()
    takes_all: ClassVar[bool] = False
    published: ClassVar[Published] = Published()
    why_no_mean: ClassVar[str] = ""
    rolls_back: ClassVar[bool] = False
    owed: ClassVar[tuple[str, ...]] = ()
    bias: ClassVar[Bias] = "biased"
    wire_bits: ClassVar[str] = ""
    learning_bits: ClassVar[str] = ""

    @property
    def selects(self) -> bool:
        """Whether it sends some coordinates and says which, as memories that mask them need."""
        return False

    def remainder(self, most: int) -> Remainder:
        """What error feedback makes of what it leaves out of segments of up to ``most`` values."""
        return "shrinks"

    def error_bound(self, numel: int) -> float:
        """The most that ``E |Q(x) - x|^2 / |x|^2`` can be for a segment of ``numel`` values without a memory.

        ``Q`` is the usual route, there and back, of workers who all have ``x``. For an unbiased method this is the
        variance bound, Omega; for a contractive one it is ``1 - delta``. Infinite where there is no bound.
        """
        return math.inf

    def worker_bound(self, numel: int) -> float:
        """The same of the way there alone, which is what a worker's memory is about."""
        return self.error_bound(numel)

    def declared_bits(self, n: int, m: int, workers: int = 1, *, learning: bool = False) -> float:
        """What ``wire_bits`` says that a matrix of ``n`` by ``m`` takes there and back as usual; NaN if nothing.

        Args:
            n: Rows.
            m: Columns.
            workers: How many.
            learning: Whether of a step in which it learns, as in its first, if there are such.

        Raises:
            ConfigurationError: If the formula cannot be computed.
        """
        names: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        names |= {"ceil": math.ceil, "log2": math.log2, "sqrt": math.sqrt, "min": min, "max": max}
        names |= {"workers": workers, "d": n * m, "n": n, "m": m, "k": max(1, round(names.get("ratio", 1.0) * n * m))}
        which = "learning_bits" if learning and self.learning_bits else "wire_bits"
        try:
            return float(eval(getattr(self, which) or "nan", {"__builtins__": {}}, names | {"nan": math.nan}))
        except Exception as error:
            raise ConfigurationError(
                f"{which}={getattr(self, which)!r} of {type(self).__name__} cannot be computed: {error}; it may have "
                f"{', '.join(names)}"
            ) from error

    def works_at(self, granularity: Granularity) -> bool:
        """Whether segments can end there; where any blocks can be segments, so can those of a scope of one's own."""
        scopes = {each.partition(":")[0] for each in self.granularities}
        return granularity.scope in scopes or (granularity.length is not None and "block" in scopes)

    def takes(self, route: str) -> bool:
        """Whether it can go this way."""
        return route in self.routes

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape gains anything; others are averaged densely."""
        return True

    def goes_on_from(self, former: Method) -> bool:
        """Whether it can go on with what another one kept, beside its memory, of the parameters that both compress."""
        return type(self) is type(former)

    @abstractmethod
    def init(self, context: Context) -> Any:
        """Sets up whatever :meth:`synchronize` needs in a context; called anew whenever parameters are bucketed."""

    @abstractmethod
    def synchronize(self, gradient: Tensor, state: Any, step: int) -> Synchronization:
        """Averages one block over all workers.

        Args:
            gradient: ``float32`` flat buffer; left with the average in the block's elements.
            state: What :meth:`init` returned.
            step: Counts synchronisations, from 0, the same on every rank.
        """


def there_and_back(worker: float, owner: float) -> float:
    """The variance bound of an unbiased operator after another: Q_M of Q_W."""
    return (1 + worker) * (1 + owner) - 1


@dataclass(frozen=True, eq=False)
class Worker:
    """A context with this worker's memory, where a method needs nothing else."""

    context: Context
    feedback: Feedback


class LinearMethod(Method):
    """A method that is a linear codec: its codes all-reduce."""

    routes = ("allreduce",)
    memories = BUILT_IN

    @property
    def selects(self) -> bool:
        """Whether its codec does."""
        return self.codec().selects

    @abstractmethod
    def codec(self) -> LinearCodec:
        """What writes a gradient."""

    def init(self, context: Context) -> Worker:
        """Sets up the memory."""
        return Worker(context, context.feedback())

    def synchronize(self, gradient: Tensor, state: Worker, step: int) -> Synchronization:
        """Takes the all-reduce route."""
        return allreduce(self.codec(), state.context.block, gradient, state.feedback, state.context.shared_key(step))


@dataclass(frozen=True, eq=False)
class CodecState:
    """The operators of workers and owners, with their memories."""

    context: Context
    worker: Codec
    feedback: Feedback
    owner: Codec | None
    owner_feedback: Feedback
    shards: Shards | None


class CodecMethod(Method):
    """A method that is a codec: its payloads are gathered, or sharded among owners who compress again."""

    routes: ClassVar[tuple[str, ...]] = ("gather", "sharded")
    memories = BUILT_IN

    @property
    def selects(self) -> bool:
        """Whether its codec does."""
        return self.codec().selects

    def takes(self, route: str) -> bool:
        """Whatever takes gather's place goes with what can be gathered."""
        return route in self.routes or ("gather" in self.routes and route in ways.names())

    def remainder(self, most: int) -> Remainder:
        """Its codec's."""
        return self.codec().remainder(most)

    @abstractmethod
    def codec(self) -> Codec:
        """What writes a gradient: the workers' operator."""

    def takes_owner(self, route: str) -> bool:
        """Whether a codec that is asked for may put the average through."""
        return route != "allreduce"

    def owner_codec(self, route: str) -> Codec | None:
        """What the average is put through: the owners' operator. On the gather route usually nothing."""
        return self.codec().owned() if route == "sharded" else None

    def init(self, context: Context) -> CodecState:
        """Sets up the memories; an owner has one like the workers'."""
        worker = self._installed(self.codec(), context)
        owner = context.owner or self._usual_owner(worker, context)
        shards, owner_feedback = None, NONE
        if context.route == "sharded":
            shards = Shards.of(context.block, context.rank, context.world_size)
            owner_feedback = context.owner_feedback(shards.own.slots, shards.own.positions)
        elif owner is not None:
            owner_feedback = context.owner_feedback(context.block.slots, context.numel)
        return CodecState(context, worker, context.feedback(), owner, owner_feedback, shards)

    def _usual_owner(self, worker: Codec, context: Context) -> Codec | None:
        """The owners' operator beside the workers' own, at home in the same buffer."""
        usual = self.owner_codec(context.route)
        return usual and self._installed(usual, context)

    def _installed(self, codec: Codec, context: Context) -> Codec:
        """A codec at home in the context's buffer."""
        return codec.installed(context.store, context.block.slots, context.numel)

    def synchronize(self, gradient: Tensor, state: CodecState, step: int) -> Synchronization:
        """Takes the chosen route."""
        context = state.context
        worker = Operator(state.worker.at(step), state.feedback, context.key(step))
        key = context.shared_key(step) if state.shards is None else context.owner_key(step)
        owner = None if state.owner is None else Operator(state.owner.at(step), state.owner_feedback, key)
        if state.shards is not None and owner is not None:
            return sharded(worker, owner, context.block, state.shards, gradient)
        return self.way(context.route)(worker, owner, context.block, gradient, context.world_size)

    def way(self, route: str) -> Route:
        """What takes a route that is not sharded."""
        return ways.get(route)
