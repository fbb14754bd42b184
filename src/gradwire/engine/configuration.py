"""All choices of one attachment, made valid once and the same on every rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from gradwire import memory as memories
from gradwire.codecs import quantize
from gradwire.codecs.codec import Codec
from gradwire.engine.choices import Choices
from gradwire.engine.nodes import Inside, Nodes
from gradwire.engine.schedule import is_scheduled, joined, stages
from gradwire.errors import ConfigurationError
from gradwire.granularity import WHOLE_ROWS
from gradwire.layout import Granularity
from gradwire.memory import Memory
from gradwire.methods import CodecMethod, Dense, Method, as_published, make, name_of, parse
from gradwire.policy import DensePolicy


@dataclass(frozen=True)
class Configuration:
    """Method, granularity, route, memory and what else decides the bytes.

    Attributes:
        method: What is sent.
        granularity: Where segments end.
        route: How payloads become an average.
        memory: What is carried from step to step.
        owner: What the average is compressed with again; None for the method's own.
        dense: What is averaged densely.
        seed: Where all randomness starts.
        fuse_bytes: Payload to gather before a collective is issued, in bytes.
        start: Steps that are averaged densely before the method begins.
        inside: Which workers average among themselves first; None if none do.
        later: What takes the method's place from some steps on, in their order: the same one with other options.
        kin: What would have been taken in its place with other numbers of workers, and may have saved a state.
    """

    method: Method
    granularity: Granularity
    route: str
    memory: Memory
    owner: Codec | None
    dense: DensePolicy
    seed: int
    fuse_bytes: int
    start: int
    inside: Inside | None = None
    later: tuple[tuple[int, Method], ...] = ()
    kin: tuple[Configuration, ...] = dataclasses.field(default=(), compare=False)

    @classmethod
    def make(cls, method: str | Method, options: dict[str, Any], *choices: Any, **named: Any) -> Configuration:
        """As :meth:`of`, with the fields of :class:`Choices` in place of one."""
        return cls.of(method, options, Choices(*choices, **named))

    @classmethod
    def of(cls, method: str | Method, options: dict[str, Any], choices: Choices) -> Configuration:
        """Checks all choices against each other; None stands for the method's own, or the publication's.

        Raises:
            ConfigurationError: If one is unknown, out of range, or not for this method, or is both written with the
                method and given.
        """
        if isinstance(method, str) and method.partition(":")[0] in ("auto", "recipe"):
            raise ConfigurationError(
                f"method={method!r} is for gradwire.compress and gradwire.Synchronizer, for all parameters at once; "
                "give one of gradwire.methods.names() here"
            )
        if isinstance(method, Mapping):
            raise ConfigurationError(
                f"method={dict(method)!r} is a method for each of several patterns, which gradwire.compress, "
                "gradwire.Synchronizer and the optimizers of gradwire.optim take; give one for all parameters here"
            )
        if is_scheduled(options):
            first, *others = [(step, cls.of(method, each, choices)) for step, each in stages(options)]
            return dataclasses.replace(first[1], later=tuple((step, each.method) for step, each in others))
        if isinstance(method, str) and ":" in method:
            name, written = parse(method)
            given = {**options, **{key: value for key, value in choices.arguments().items() if value is not None}}
            if twice := written.keys() & given.keys():
                raise ConfigurationError(
                    f"method={method!r} came with {', '.join(f'{each}={given[each]!r}' for each in sorted(twice))}; "
                    "write it with the method or give it, not both"
                )
            options, choices = written_out(options | written, choices)
            method = name
        options, published = as_published(method, options)
        given = {name: value for name, value in choices.arguments().items() if value is not None}
        choices = Choices(**{**published, **given})
        granularity, route, memory, owner = choices.granularity, choices.route, choices.memory, choices.owner
        made = make(method, options)
        name = name_of(made)
        scope = Granularity.parse(made.granularities[0] if granularity is None else granularity)
        if not made.works_at(scope):
            why = f" because {made.why_granularity}" if made.why_granularity else ""
            raise ConfigurationError(
                f"{name} cannot work at granularity={str(scope)!r}{why}; its own: {', '.join(made.granularities)}"
            )
        way = made.routes[0] if route is None else route
        if not made.takes(way):
            raise ConfigurationError(f"{name} cannot take route={way!r}; its routes: {', '.join(made.routes)}")
        scope = dataclasses.replace(scope, rows=made.whole_rows and way == "sharded")
        _check_whole("fuse_bytes", choices.fuse_bytes, "of bytes, from 1", 1)
        _check_whole("start", choices.start, "of steps, from 0", 0)
        _check_whole("seed", choices.seed, "of any size", -math.inf)
        policy: object = choices.dense
        if not isinstance(policy, DensePolicy | None):
            raise ConfigurationError(
                f"dense={policy!r} is no policy; give gradwire.DensePolicy(below=1024, vectors=True), or one "
                "with other numbers"
            )
        carried = memories.parse(made.memory if memory is None else memory)
        _check_memory(made, name, carried, scope)
        if owner is not None and not (isinstance(made, CodecMethod) and made.takes_owner(way)):
            raise ConfigurationError(
                f"owner={owner!r} has no place: {name} does not compress its average again on route={way!r}, or does "
                "so by itself alone; leave it out"
            )
        again = None if owner is None else quantize.parse(owner)
        if again is not None and not carried.owner().bears(left := again.remainder(scope.most)):
            raise ConfigurationError(
                f"owner={owner!r} cannot go with memory={carried}: {_GROWTH[left]}; choose memory='none', "
                "or a finer owner such as 'qsgd:8'"
            )
        return cls(
            method=made,
            granularity=scope,
            route=way,
            memory=carried,
            owner=again,
            dense=made.dense if choices.dense is None else choices.dense,
            seed=int(choices.seed),
            fuse_bytes=int(choices.fuse_bytes),
            start=int(choices.start),
            inside=None if choices.inside is None else Inside.parse(choices.inside),
        )

    @property
    def rules(self) -> tuple[Configuration, ...]:
        """All there are."""
        return (self,)

    @property
    def stages(self) -> tuple[Configuration, ...]:
        """What holds one after the other, if options change with time."""
        return tuple(map(self.at, (0, *(step for step, _ in self.later))))

    def at(self, step: int) -> Configuration:
        """What holds in one of the method's steps."""
        if not self.later:
            return self
        method = next((each for start, each in reversed(self.later) if start <= step), self.method)
        return dataclasses.replace(self, method=method, later=())

    @property
    def whole(self) -> bool:
        """Whether it takes the gradient of a whole model at once."""
        return self.granularity.scope == "model"

    def rule(self, name: str) -> Configuration:
        """What a parameter of this name goes by."""
        return self

    def on(self, nodes: Nodes) -> Configuration:
        """The same, with the nodes that there are."""
        inside, kin = Inside(nodes.workers, nodes.dtype, nodes.codec), tuple(each.on(nodes) for each in self.kin)
        return dataclasses.replace(self, inside=inside, kin=kin)

    def as_saved(self, described: Mapping[str, str]) -> Configuration:
        """What a state was saved with, if that is kin, else this one."""
        kin = (each for each in (self, *self.kin) if each.whole == self.whole)
        return next((each for each in kin if each.describe() == described), self)

    def check_names(self, names: Sequence[str]) -> None:
        """Any parameters will do."""

    def compresses(self, shape: tuple[int, ...]) -> bool:
        """Whether the method takes a tensor of this shape; otherwise it is averaged densely."""
        if self.method.takes_all:
            return True
        return not self.dense.keeps_dense(shape) and self.method.accepts(shape)

    def in_full(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape is averaged as it is: by policy, or because the method does so."""
        return isinstance(self.method, Dense) or not self.compresses(shape)

    def in_parts(self, shape: tuple[int, ...], nodes: Nodes | None) -> bool:
        """Whether the workers of a node share a tensor of this shape, and each remembers its own rows."""
        return nodes is not None and self.compresses(shape) and nodes.share(self.method, shape)

    def memory_of(self, shape: tuple[int, ...]) -> Memory:
        """What is carried from step to step of a tensor of this shape."""
        return self.memory if self.compresses(shape) else self.memory.uncompressed()

    def form(self, shape: tuple[int, ...], nodes: Nodes | None = None) -> tuple[object, ...]:
        """What decides whether a memory of a tensor of this shape can go on under other choices."""
        kinds: list[object] = [(type(each), each.borrows) for each in self.memory_of(shape).within]
        kinds.append(self.in_parts(shape, nodes))
        if not (isinstance(self.method, CodecMethod) and self.compresses(shape)):
            return tuple(kinds)
        owned = self.owner is not None or self.method.owner_codec(self.route) is not None
        cut = (self.granularity.segment(shape), self.granularity.unit(shape)) if self.route == "sharded" else ()
        return (*kinds, self.route, owned, cut)

    @property
    def options(self) -> dict[str, Any]:
        """The method's, those that change by the step from which they count."""
        methods = {0: self.method, **dict(self.later)}
        names = [field.name for field in dataclasses.fields(self.method)]  # type: ignore[arg-type]
        return {name: joined({step: getattr(each, name) for step, each in methods.items()}) for name in names}

    def describe(self) -> dict[str, str]:
        """Everything that must be the same on all ranks, as text."""
        return {
            "method": name_of(self.method),
            **{name: str(value) for name, value in self.options.items()},
            "granularity": str(self.granularity),
            "route": self.route,
            **({"shares": WHOLE_ROWS} if self.granularity.rows else {}),
            "memory": str(self.memory),
            **({} if self.owner is None else {"owner": str(self.owner)}),
            **({} if not self.start else {"start": str(self.start)}),
            **({} if self.inside is None else {"inside": str(self.inside)}),
            "dense": str(self.dense),
            "seed": str(self.seed),
            "fuse_bytes": str(self.fuse_bytes),
        }

    def __str__(self) -> str:
        described = self.describe()
        name = described.pop("method")
        for aside in ("dense", "seed", "fuse_bytes"):
            del described[aside]
        dense = "nothing" if self.method.takes_all else str(self.dense)
        return f"{name}({', '.join(f'{key}={value}' for key, value in described.items())}, dense: {dense})"


WRITTEN = ("granularity", "route", "memory", "owner")
"""Choices that may be written with a method, as its options are."""


def written_out(options: dict[str, Any], choices: Choices) -> tuple[dict[str, Any], Choices]:
    """Takes choices out from among a method's options, to stand before those given for all."""
    written = {name: options[name] for name in WRITTEN if name in options}
    left = {name: value for name, value in options.items() if name not in written}
    return left, dataclasses.replace(choices, **written)


_GROWTH = {
    "stays": "what it leaves of a value may be as large as the largest, so error feedback would grow without end",
    "grows": "what it leaves out may be larger than what it was given, so error feedback would grow without end",
}
"""Why a remainder that does not shrink goes with few memories."""


def _check_whole(name: str, value: object, which: str, least: float) -> None:
    """Raises ConfigurationError unless a choice is a whole number from ``least`` on."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ConfigurationError(f"{name}={value!r} is out of range; choose a whole number {which}")


def _check_memory(method: Method, name: str, carried: Memory, granularity: Granularity) -> None:
    """Raises ConfigurationError unless the method can carry the memory."""
    impossible = [memories.get(known) for known in memories.BUILT_IN if known not in method.memories]
    for part in carried.within:
        if type(part) in impossible:
            raise ConfigurationError(f"{name} cannot carry memory={part}; its memories: {', '.join(method.memories)}")
    if carried.masks and not method.selects:
        raise ConfigurationError(f"memory={carried} is for methods that send some coordinates only; {name} does not")
    if carried.unbiased and method.bias != "unbiased":
        raise ConfigurationError(f"memory={carried} is for unbiased methods; {name} is {method.bias}; choose 'ef21'")
    left = method.remainder(granularity.most)
    if not carried.bears(left):
        settings = "" if method.bias == "unbiased" else ", with values that are written so coarsely,"
        instead = "'diana', which is made for it, or 'none'" if method.bias == "unbiased" else "'none', or finer values"
        raise ConfigurationError(f"{name}{settings} cannot carry memory={carried}: {_GROWTH[left]}; choose {instead}")
