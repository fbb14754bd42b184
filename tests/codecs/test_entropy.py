"""Entropy-coded gaps: what is read is what was written, how long it is, what waits, and what no encoder writes."""

import inspect
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from unittest import mock

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gradwire
from catalogue import OPTIONS
from codec_checks import by_the_reference, check_compiled_once, check_is_the_reference, decoded, encoded
from gradwire import methods
from gradwire.codecs import index
from gradwire.codecs.adaptive import AdaptiveSparse
from gradwire.codecs.capacity import INDEX_ROOM, SHRINK, Capacity
from gradwire.codecs.index import EliasFano, Entropy
from gradwire.codecs.select import Fixed, TopMagnitudes
from gradwire.codecs.sparse import Sparse
from gradwire.engine.configuration import Configuration
from gradwire.errors import PayloadError
from gradwire.kernels import cpu, reference
from gradwire.kernels.reference import gaps_low_bytes
from gradwire.layout import Block, flat_slots
from gradwire.local.world import LocalWorld
from gradwire.memory import NONE, Feedback, Store
from kernel_inputs import BLOCKS, GRADIENTS, block_of, covered, normal
from together import together

HEAD = 12


def written(positions: Tensor, universe: int, room: int | None = None) -> tuple[Tensor, int]:
    """A payload, the same by both, and how many fitted."""
    payloads, counts = [], []
    for by in (nullcontext(), by_the_reference()):
        with by:
            payload = torch.full((room or Entropy().size(len(positions), universe),), 0x5A, dtype=torch.uint8)
            counts.append(Entropy().encode(positions, universe, payload))
            payloads.append(payload)
    assert counts[0] == counts[1]
    assert torch.equal(*payloads)
    return payloads[0], counts[0]


def read(payload: Tensor, count: int, universe: int) -> Tensor | None:
    """Positions, the same by both; None if both refuse."""
    found: list[Tensor | None] = []
    for by in (nullcontext(), by_the_reference()):
        positions = torch.zeros(count, dtype=torch.int64)
        with by:
            try:
                found.append(positions[: Entropy().decode(payload, universe, positions)])
            except PayloadError:
                found.append(None)
    left, right = found
    assert (left is None) == (right is None)
    assert left is None or right is None or torch.equal(left, right)
    return left


def clumped(count: int, universe: int, seed: int = 0) -> Tensor:
    """Positions in runs of different density."""
    draw = np.random.default_rng(seed)
    density = np.repeat(draw.random(-(-universe // 50)) ** 6, 50)[:universe] + 1e-9
    chosen = draw.choice(universe, count, replace=False, p=density / density.sum())
    return torch.from_numpy(np.sort(chosen).astype(np.int64))


@settings(max_examples=60, deadline=None)
@given(
    gaps=st.lists(st.one_of(st.integers(1, 4), st.integers(1, 2000), st.integers(1, 2**29)), max_size=30),
    repeated=st.integers(1, 20),
    spare=st.sampled_from([1, 2, 1000]),
    share=st.floats(0, 1),
)
def test_what_is_read_is_what_was_written(gaps: list[int], repeated: int, spare: int, share: float) -> None:
    positions = torch.tensor(gaps * (repeated if sum(gaps) < 2**20 else 1), dtype=torch.int64).cumsum(0) - 1
    universe = int(positions[-1]) + spare if len(positions) else spare
    payload, count = written(positions, universe)
    assert count == len(positions)
    found = read(payload, count, universe)
    assert found is not None
    assert torch.equal(found, positions)
    wanted = int(payload[:4].view(torch.int32))
    assert HEAD <= wanted <= payload.numel()
    assert not payload[wanted:].any()
    short, fitted = written(positions, universe, HEAD + int(share * (payload.numel() - HEAD)) // 4 * 4)
    found = read(short, len(positions), universe)
    assert found is not None
    assert torch.equal(found, positions[:fitted])
    assert int(short[:4].view(torch.int32)) == wanted
    assert (fitted == len(positions)) == (wanted <= len(short))


def test_lengths() -> None:
    """Near the entropy at random places; fewer bits where they clump; never more than a head above Elias-Fano."""
    universe, count = 2_000_000, 20_000
    random = torch.randperm(universe, generator=torch.Generator().manual_seed(3))[:count].sort().values
    entropy = count * (
        np.log2(universe / count) + np.log2(np.e) * (universe / count - 1) * -np.log1p(-count / universe)
    )
    fixed = EliasFano().size(count, universe)
    payload = torch.zeros(Entropy().size(count, universe), dtype=torch.uint8)
    for positions, least, most in (
        (random, entropy / 8, 1.01 * entropy / 8),
        (clumped(count, universe), 0, 0.92 * fixed),
        (torch.arange(count), 0, 0.02 * fixed),
    ):
        Entropy().encode(positions, universe, payload)
        assert least <= int(payload[:4].view(torch.int32)) <= min(most, fixed + HEAD)


HONEST = {
    "frame": (clumped(300, 3000), None),
    "elias-fano": (torch.arange(7, 3000, 200), None),
    "short": (clumped(300, 3000), 200),
}


@cache
def honest(source: str) -> tuple[Tensor, Tensor]:
    positions, room = HONEST[source]
    return positions, written(positions, 3000, room)[0]


@settings(max_examples=200, deadline=None)
@given(
    places=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6),
    source=st.sampled_from(list(HONEST)),
)
def test_any_bytes_are_read_alike_or_refused_alike(places: list[tuple[int, int]], source: str) -> None:
    universe = 3000
    positions, payload = honest(source)[0], honest(source)[1].clone()
    for place, value in places:
        payload[place % payload.numel()] = value
    found = read(payload, len(positions), universe)
    if found is not None and len(found):
        assert bool((found.diff() > 0).all())
        assert int(found[0]) >= 0
        assert int(found[-1]) < universe


def with_frame(frame: bytes, count: int, low: bytes = b"") -> Tensor:
    """A payload with ``count`` positions and any frame."""
    body = frame + bytes(-len(frame) % 4) + low
    head = np.array([HEAD + 4, count, len(frame)], dtype="<u4").tobytes()
    return torch.frombuffer(bytearray(head + body), dtype=torch.uint8)


def frame(content: bytes, **options: object) -> bytes:
    parameters = zstandard.ZstdCompressionParameters(format=zstandard.FORMAT_ZSTD1_MAGICLESS, **options)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(content)


def test_frames_that_no_encoder_writes_are_refused() -> None:
    """Frames of another size, of none that is told, with a checksum, cut short, followed by others, or out of range."""
    good = frame(b"\x01" * 40)
    assert read(with_frame(good, 40), 40, 50) is not None
    huge = bytes([0xE0]) + (2**50).to_bytes(8, "little") + b"\x01\x00\x00"
    large_window = bytes([0x40, 0xF8]) + (40 - 256 & 0xFFFF).to_bytes(2, "little") + b"\x03\x00\x00\x01"
    for bad in (
        frame(b"\x01" * 39),
        frame(b"\x01" * 4000),
        frame(b"\x01" * 40, write_content_size=False),
        frame(b"\x01" * 40, write_checksum=True),
        good[:-1],
        good + good,
        huge,
        large_window,
        frame(b"\x00" * 40),
        frame(b"\x7e" * 40),
        frame(b"\x7d" * 40),
        frame(b"\x08" * 40),
    ):
        assert read(with_frame(bad, 40, bytes(400)), 40, 50) is None
    assert read(with_frame(frame(b"\x08" * 40), 40, bytes(8)), 40, 10**6) is None


def test_gaps_of_any_length() -> None:
    """Up to 63 bits, of which all but two are low ones."""
    positions = torch.tensor([0, 1, 3, 2**33, 2**33 + 1, 2**62 + 5, 2**63 - 2])
    universe = 2**63 - 1
    for kernel in (cpu, reference):
        classes, low = torch.empty(7, dtype=torch.uint8), torch.zeros(gaps_low_bytes(7, universe), dtype=torch.uint8)
        size = kernel.gaps_encode(positions, universe, classes, low)
        for other in (cpu, reference):
            found = torch.empty_like(positions)
            other.gaps_decode(classes, low[:size], universe, found)
            assert torch.equal(found, positions)
            with pytest.raises(PayloadError, match="7 ascending"):
                other.gaps_decode(classes, low[:size], universe - 1, found)
            with pytest.raises(PayloadError, match="7 ascending"):
                other.gaps_decode(classes, low[: size - 4], universe, found)
        for bad in ([5, 5], [5, 4], [-1], [universe]):
            with pytest.raises(PayloadError, match="must be ascending"):
                kernel.gaps_encode(torch.tensor(bad), universe, classes, low)


def with_room(codec: Sparse | AdaptiveSparse, block: Block, share: float) -> Sparse | AdaptiveSparse:
    """With a room that is kept, but capacities that are not."""
    store = Store(torch.device("cpu"))
    for slot in block.slots:
        store.put(INDEX_ROOM.kept_as, slot.name, torch.tensor(share, dtype=torch.float64))
    room = replace(INDEX_ROOM, store=store)
    return replace(codec, room=room) if isinstance(codec, Sparse) else replace(codec, index_room=room)


CODECS = {
    "top-k": Sparse(TopMagnitudes(0.1), indices=Entropy()),
    "threshold": AdaptiveSparse(Fixed(1.5), 0.3, indices=Entropy()),
}
shares = together("share", [1.0, 0.4])
blocks = together("name", ["one element", "odd layers", "small blocks", "shard", "packed shard"])
gradients = together("values", ["normal", "mostly zeros", "nan", "many infinities"])
codecs = together("codec", CODECS.values(), CODECS)


@shares
@codecs
@blocks
@gradients
def test_is_the_reference(name: str, values: str, codec: Sparse, share: float) -> None:
    block, gradient = BLOCKS[name], GRADIENTS[values]
    check_is_the_reference(with_room(codec, block, share), block, gradient, (0.9, 0.3))


@shares
@codecs
@blocks
@gradients
def test_residual_is_what_was_not_sent(name: str, values: str, codec: Sparse, share: float) -> None:
    block, gradient = BLOCKS[name], GRADIENTS[values]
    codec = with_room(codec, block, share)
    residual = normal(99)
    t, old = 0.9 * residual + 0.3 * gradient, residual.clone()
    sent = decoded(codec, block, encoded(codec, block, gradient, Feedback(residual, 0.9, 0.3))[None])
    inside, marked = covered(block), sent.isnan()
    assert residual.isfinite().all()
    assert torch.equal(residual[inside & ~marked & t.isfinite()], (t - sent)[inside & ~marked & t.isfinite()])
    assert torch.equal(residual[inside & ~t.isfinite()], old[inside & ~t.isfinite()])
    assert bool(marked.any()) == (not t[inside].isfinite().all())
    for segment in range(block.segment_count):
        first, last = block.segments[segment : segment + 2]
        spans = [slice(start, start + length) for start, length, _ in block.runs[first:last]]
        assert any(marked[span].any() for span in spans) or all(t[span].isfinite().all() for span in spans)


def test_room_follows_the_neediest() -> None:
    block = BLOCKS["large"]
    codec = with_room(CODECS["top-k"], block, 1.0)
    assert isinstance(codec, Sparse)
    tight, loose = normal() * torch.linspace(-1, 1, len(normal())) ** 9, normal(2)

    def share() -> float:
        assert codec.room.store is not None
        (kept,) = {float(codec.room.store.get(INDEX_ROOM.kept_as, slot.name)) for slot in block.slots}
        return kept

    def step(*values: Tensor) -> float:
        payloads = torch.stack([encoded(codec, block, each, NONE) for each in values])
        codec.decode(block, payloads, torch.zeros_like(values[0]), 1.0)
        news = codec.news(block, payloads)
        codec.heard(block, news[None])
        return float(news.view(torch.float32))

    wide, narrow = step(tight, loose), step(tight)
    assert narrow < wide <= 1
    assert share() == pytest.approx(max(INDEX_ROOM.spare * narrow, SHRINK * min(INDEX_ROOM.spare * wide, 1)))
    bad, before = tight.clone(), share()
    bad[100] = torch.nan
    step(tight, bad)
    assert share() == before


def test_news_that_no_codec_tells_keep_rooms_possible() -> None:
    block = BLOCKS["large"]
    for news in (-3.0, 0.0, 1e30):
        codec = with_room(CODECS["top-k"], block, 0.4)
        codec.heard(block, torch.tensor([[news], [0.1]]).view(torch.uint8))
        assert codec.payload_bytes(block) % 4 == 0
        assert 0 < codec.payload_bytes(block) <= CODECS["top-k"].payload_bytes(block)


@pytest.mark.parametrize(("method", "route"), [("topk", "sharded"), ("topk", "gather"), ("threshold", "gather")])
def test_steps_after_the_first_are_shorter_and_lose_nothing(method: str, route: str) -> None:
    """Gradients clump in a fifth of a matrix, then elsewhere: all ranks agree on every size, and what waits is kept."""
    slots = flat_slots([("a", (60, 70)), ("b", (300, 40))])
    options = {"ratio": 0.05} if method == "topk" else {"threshold": 1.0, "capacity": 1.0}
    worlds = {
        indices: LocalWorld(Configuration.make(method, {**options, "indices": indices}, route=route), slots, 3)
        for indices in ("entropy", "elias-fano")
    }
    lengths: dict[str, list[int]] = {indices: [] for indices in worlds}
    put_in, taken_out = torch.zeros(slots[-1].stop), torch.zeros(slots[-1].stop)
    for step in range(8):
        values = [torch.randn(slots[-1].stop, generator=torch.Generator().manual_seed(9 * step + r)) for r in range(3)]
        loud = torch.arange(slots[-1].stop) // 40 % (5 if step < 6 else 2) == 0
        for each in values:
            each.mul_(torch.where(loud, 1.0, 0.01))
        for indices, world in worlds.items():
            copies = [each.clone() for each in values]
            lengths[indices].append(world.average(copies).written_bytes)
            assert torch.equal(copies[0], copies[2])
            if indices == "entropy":
                put_in += sum(values) / 3
                taken_out += copies[0]
    assert sum(lengths["entropy"][2:]) < sum(lengths["elias-fano"][2:])
    if route == "gather":
        owed = sum(engine.store.state()["residual"][n].flatten() for engine in worlds["entropy"].engines for n in "a")
        torch.testing.assert_close((taken_out[: slots[0].stop] + owed / 3), put_in[: slots[0].stop], rtol=0, atol=1e-4)


def test_every_method_takes_it_or_says_why_not() -> None:
    """The catalogue, with which all laws are tried, has it for all that take it."""
    refusing: dict[str, str] = {}
    for name in methods.names():
        if "indices" in inspect.signature(methods.get(name)).parameters:
            try:
                methods.get(name)(indices="entropy")
            except gradwire.ConfigurationError as error:
                refusing[name] = str(error)
            else:
                assert any(options.get("indices") == "entropy" for options in OPTIONS[name]), name
    assert list(refusing) == ["gtopk", "oktopk", "scalecom"]
    assert all("choose 'elias-fano'" in message for message in refusing.values())


def test_without_the_library_it_says_what_to_install() -> None:
    with (
        mock.patch.dict(sys.modules, {"zstandard": None}),
        pytest.raises(gradwire.ConfigurationError, match=r"pip install gradwire\[entropy\]"),
    ):
        index.parse("entropy")


def test_room_has_what_is_always_there() -> None:
    block = block_of([1000])
    store = Store(torch.device("cpu"))
    room = Capacity(store=store)
    assert room.bytes(block, 12, 100) == 100
    store.put("room", block.slots[0].name, torch.tensor(1e-9, dtype=torch.float64))
    assert room.bytes(block, 12, 100) == 16
    assert room.bytes(block, 12, 12) == 12


def test_compiled_once() -> None:
    check_compiled_once("gaps")
