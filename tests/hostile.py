"""Answers that no honest worker sends: how they are made, and what must hold when a method gets them.

A *program* is a few bytes that say how an honest answer is spoilt, so that hypothesis, a random loop or a fuzzer that
follows coverage can all write them. Whatever it does, either `PayloadError` is raised and nothing was written, or the
answer decodes; both sets of kernels agree which, and on every bit; and nothing outside the block is read or written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from catalogue import Case, cases
from gradwire import methods
from gradwire.codecs import quantize
from gradwire.codecs.codec import Codec
from gradwire.engine.configuration import Configuration
from gradwire.engine.engine import Engine
from gradwire.errors import PayloadError
from gradwire.kernels import dispatch
from gradwire.layout import Block, Granularity, flat_slots
from gradwire.local.world import LocalWorld
from gradwire.memory import Feedback, Store
from gradwire.methods.method import CodecMethod
from gradwire.policy import DensePolicy
from gradwire.wire import Meter, Pending, Scheduler, Transport
from guarded import copied, guarded, release
from kernel_inputs import no_kernels

SHAPES = [("conv", (5, 3, 3, 3)), ("hole", (29,)), ("linear", (17, 33)), ("one", (1,)), ("odd", (71,))]
SLOTS = tuple(slot for slot in flat_slots(SHAPES) if slot.name != "hole")
NUMEL = SLOTS[-1].stop
WORKERS = 3
STEPS = 3
PER_POSITION = 64
"""Bytes of a payload for each position, at most, whatever was learnt from others."""

WORDS = np.array(
    [
        *(0, 1, 2, 7, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1),
        *(0x7FC00000, 0x7F800001, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x00800000, 0x3F800000, 0xBF800000),
    ],
    dtype=np.uint32,
)
"""Integers at edges, which as floats are denormal, and floats: NaN, infinities, the largest, the smallest, ones."""


def spoilt(answer: Tensor, program: bytes) -> Tensor:
    """A copy of an answer, changed as a program says: first its shape, then four bytes for each change."""
    program = program or b"\0"
    changed = reshaped(answer, program[0])
    content = changed.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy()
    size = content.size
    for at in range(1, len(program) - 3, 4) if size >= 4 else ():
        kind, high, low, value = program[at : at + 4]
        place = (high << 8 | low) * size >> 16
        word = content[min(place, size - 4) // 4 * 4 :][:4].view(np.uint32)
        match kind % 8:
            case 0:
                content[place] ^= 1 << value % 8
            case 1:
                content[place] = value
            case 2:
                word[:] = WORDS[value % len(WORDS)]
            case 3:
                content[place : place + value // 2 + 1] = 0xFF * (value % 2)
            case 4:
                word[:] += np.uint32(value - 128 & 0xFFFFFFFF)
            case 5:
                content[: size // 4 * 4].view(np.uint32)[value % 16 % (size // 4)] = WORDS[low % len(WORDS)]
            case 6:
                content[place:] = np.random.default_rng(value).integers(0, 256, size - place, dtype=np.uint8)
            case 7:
                moved = content[place : place + value + 1].copy()
                target = min(low * size >> 8, size - moved.size)
                content[target : target + moved.size] = moved
    return torch.from_numpy(content).view(changed.dtype).view(changed.shape) if size else changed.clone()


def reshaped(answer: Tensor, how: int) -> Tensor:
    """Mostly as it is; else cut short or longer, by rows or columns, or of another type."""
    last = answer.dim() - 1
    match how:
        case 1 | 2 | 3 | 4:
            return answer.narrow(last, 0, max(answer.shape[last] - (1, 4, 8, 64)[how - 1], 0))
        case 5 | 6 | 7 | 8:
            return torch.cat((answer, answer.narrow(last, 0, min((1, 4, 8, 64)[how - 5], answer.shape[last]))), last)
        case 9:
            return answer[:-1]
        case 10:
            return torch.cat((answer, answer[-1:]))
        case 11:
            return answer[:0]
        case 12:
            return answer.flatten()
        case 13:
            return answer.to(torch.float64)
    return answer


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal, zeros by their signs, and any NaN like any other."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if not left.dtype.is_floating_point:
        return torch.equal(left, right)
    alike = (left == right) & (left.signbit() == right.signbit()) | (left.isnan() & right.isnan())
    return bool(alike.all())


def using(reference_kernels: bool) -> Any:
    return mock.patch.object(dispatch, "overrides", no_kernels) if reference_kernels else nullcontext()


@cache
def _drawn(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def noise(seed: int) -> Tensor:
    return _drawn(seed).clone()


@dataclass(frozen=True, eq=False)
class Decoding:
    """A codec and a block, whose payloads are spoilt.

    Attributes:
        name: For messages.
        codec: What decodes.
        block: What it decodes to.
    """

    name: str
    codec: Codec
    block: Block

    def fresh(self) -> tuple[Codec, Store]:
        store = Store(torch.device("cpu"))
        return self.codec.installed(store, self.block.slots, NUMEL), store

    @cached_property
    def honest(self) -> Tensor:
        codec, _ = self.fresh()
        payloads = torch.empty((2, codec.payload_bytes(self.block)), dtype=torch.uint8)
        for row, payload in enumerate(payloads):
            codec.encode(self.block, noise(row), Feedback(None), payload, row)
        return payloads

    @cached_property
    def outside(self) -> Tensor:
        mask = torch.ones(NUMEL, dtype=torch.bool)
        for part in self.block.parts(mask):
            part.fill_(False)
        return mask

    def check(self, program: bytes, only_compiled: bool = False) -> bool:
        """Whether spoilt payloads are accepted, after the laws were held against what came of them."""
        payloads = copied(spoilt(self.honest, program))
        outcomes = [self._decoded(payloads, which) for which in ((False,) if only_compiled else (False, True))]
        release()
        if len(outcomes) > 1:
            (left, kept), (right, kept_by_reference) = outcomes
            assert (left is None) == (right is None), f"{self.name}: accepted by one of compiled and reference only"
            if left is not None and right is not None:
                assert same_bits(left, right), f"{self.name}: other bits than the reference"
            check_same_state(self.name, kept, kept_by_reference)
        return outcomes[0][0] is not None

    def _decoded(self, payloads: Tensor, reference_kernels: bool) -> tuple[Tensor | None, Any]:
        codec, store = self.fresh()
        before = noise(9)
        out = copied(before, at_the_end=bool(len(payloads) % 2))
        with using(reference_kernels):
            try:
                codec.decode(self.block, payloads, out, 0.5)
            except PayloadError:
                assert same_bits(out, before), f"{self.name}: written to before it was refused"
                return None, store.state()
        assert same_bits(out[self.outside], before[self.outside]), f"{self.name}: written outside of the block"
        room = codec.payload_bytes(self.block)
        assert room <= 4096 + PER_POSITION * self.block.positions, f"{self.name}: next payload of {room} bytes"
        return out.clone(), store.state()


def check_same_state(name: str, left: Any, right: Any) -> None:
    assert left.keys() == right.keys(), name
    for field in left:
        for parameter, kept in left[field].items():
            assert same_bits(kept, right[field][parameter]), (
                f"{name}: another {field} of {parameter} than the reference"
            )


@dataclass(frozen=True)
class Tiled(quantize.DeadZone):
    """In tiles of a few elements, as a large gradient is in many."""

    tile: int = 40


def decodings(name: str) -> list[Decoding]:
    """All codecs of a method, on blocks of all its granularities and on an owner's shard."""
    found: dict[tuple[str, str], Decoding] = {}
    for case in (case for case in cases() if case.method == name):
        method = methods.get(name)(**case.options)
        if isinstance(method, CodecMethod):
            codecs = [method.codec(), *(method.owner_codec(route) for route in method.routes)]
            codecs += [Tiled(codec.bits) for codec in codecs if isinstance(codec, quantize.DeadZone)]
            sharded = "sharded" in method.routes
            _collect(found, [codec.at(0) for codec in codecs if codec is not None], case.granularity, sharded)
    return list(found.values())


def named_decodings() -> list[Decoding]:
    """All codecs with a name of their own."""
    found: dict[tuple[str, str], Decoding] = {}
    names = [
        "sign",
        "vote",
        "onebit",
        "dynamic",
        "natural",
        "natural:9",
        "terngrad",
        "3lc",
        "exponent",
        "qsgd:4",
        "quantile:256",
    ]
    for granularity in ("layer", "model", "block:96"):
        _collect(found, [quantize.parse(each) for each in names], granularity, True)
    return list(found.values())


def _collect(found: dict[tuple[str, str], Decoding], codecs: Sequence[Codec], granularity: str, sharded: bool) -> None:
    blocks = {granularity: Block.cut(SLOTS, Granularity.parse(granularity))}
    if sharded:
        blocks[f"{granularity}, a shard"] = blocks[granularity].shards(WORKERS)[1]
    for codec in codecs:
        for where, each in blocks.items():
            if (key := (repr(codec), where)) not in found:
                found[key] = Decoding(f"{codec} on {where}", codec, each)


class Kept:
    """A transport whose answers are kept.

    Attributes:
        landed: What came, in order.
    """

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        self.landed: list[Tensor] = []

    def __getattr__(self, collective: str) -> Callable[..., Pending]:
        def start(*arguments: Any) -> Pending:
            pending = getattr(self._inner, collective)(*arguments)

            def wait() -> Tensor:
                self.landed.append((answer := pending()).clone())
                return answer

            return wait

        return start


class Replayed:
    """A transport that answers as was recorded, but for one collective, whose answer is spoilt."""

    world_size = WORKERS

    def __init__(self, rank: int, answers: Sequence[Tensor], spoilt_one: int, program: bytes) -> None:
        self.rank = rank
        self._answers = iter(enumerate(answers))
        self._spoilt_one = spoilt_one
        self._program = program

    def _next(self, *_: object) -> Pending:
        number, answer = next(self._answers)
        changed = spoilt(answer, self._program) if number == self._spoilt_one else answer
        return lambda: copied(changed)

    all_reduce = broadcast = exchange = all_gather = all_to_all = _next


@dataclass(frozen=True, eq=False)
class World:
    """Workers that are attached in one way.

    Attributes:
        case: Which one.
    """

    case: Case

    @cached_property
    def configuration(self) -> Configuration:
        return Configuration.make(
            self.case.method,
            dict(self.case.options),
            granularity=self.case.granularity,
            route=self.case.route,
            memory=self.case.memory,
            dense=DensePolicy(below=0, vectors=False),
        )

    @cached_property
    def recorded(self) -> list[list[Tensor]]:
        """What each rank lands when nobody lies."""
        transports: list[Kept] = []

        def kept(transport: Transport) -> Transport:
            transports.append(Kept(transport))
            return transports[-1]

        world = LocalWorld(self.configuration, SLOTS, WORKERS, around=kept)
        for step in range(STEPS):
            world.average([noise(10 * step + rank) for rank in range(WORKERS)])
        return [transport.landed for transport in transports]


@dataclass(frozen=True, eq=False)
class Victim:
    """A rank of a world to which others lie.

    Attributes:
        world: Which one.
        rank: Which one there.
    """

    world: World
    rank: int

    @property
    def case(self) -> Case:
        return self.world.case

    @property
    def recorded(self) -> list[Tensor]:
        """What the rank lands when nobody lies."""
        return self.world.recorded[self.rank]

    def check(self, number: int, program: bytes, only_compiled: bool = False) -> bool:
        """Whether the rank lives through a lie in one of its answers, after the laws were held against it."""
        spoilt_one = number % len(self.recorded)
        outcomes = [self._run(spoilt_one, program, which) for which in ((False,) if only_compiled else (False, True))]
        release()
        if len(outcomes) > 1:
            (left, kept), (right, kept_by_reference) = outcomes
            assert (left is None) == (right is None), f"{self.case}: accepted by one of compiled and reference only"
            if left is not None and right is not None and self.case.method not in ("powersgd", "acpsgd", "dion"):
                assert same_bits(left, right), f"{self.case}: other bits than the reference"
                check_same_state(str(self.case), kept, kept_by_reference)
        return outcomes[0][0] is not None

    def _run(self, spoilt_one: int, program: bytes, reference_kernels: bool) -> tuple[Tensor | None, Any]:
        def zeros(store: Store, size: int, dtype: torch.dtype) -> Tensor:
            assert dtype == torch.float32
            return guarded(size, at_the_end=True)

        scheduler = Scheduler(Replayed(self.rank, self.recorded, spoilt_one, program), Meter(), 1)
        with using(reference_kernels), mock.patch.object(Store, "_zeros", zeros):
            engine = Engine(self.world.configuration, self.rank, WORKERS, torch.device("cpu"))
            unit = engine.unit(SLOTS)
            averages = []
            for step in range(STEPS):
                before = noise(10 * step + self.rank)
                gradient = copied(before)
                try:
                    scheduler.submit(engine.synchronizations(unit, gradient), lambda: None, last=True)
                except PayloadError:
                    scheduler.abandon()
                    assert same_bits(gradient[HOLE], before[HOLE]), f"{self.case}: written outside of the block"
                    return None, None
                assert same_bits(gradient[HOLE], before[HOLE]), f"{self.case}: written outside of the block"
                averages.append(gradient.clone())
                engine.step += 1
        return torch.stack(averages), engine.store.state()


HOLE = slice(flat_slots(SHAPES)[1].offset, flat_slots(SHAPES)[1].stop)


def victims(name: str) -> list[Victim]:
    """All ways to attach a method, on all ranks."""
    worlds = [World(case) for case in cases() if case.method == name]
    return [Victim(world, rank) for world in worlds for rank in range(WORKERS)]
