"""3LC's shortened runs: what fits, what waits, and what no encoder writes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gradwire
from codec_checks import by_the_reference, check_is_the_reference, check_residual_is_what_was_not_sent, decoded, encoded
from gradwire.codecs.capacity import SHRINK, SPARE, Capacity
from gradwire.codecs.codec import Codec
from gradwire.codecs.quantize import Quantiser, ZeroRuns
from gradwire.engine.configuration import Configuration
from gradwire.errors import PayloadError
from gradwire.kernels import codes
from gradwire.kernels.code import trits_stride
from gradwire.layout import Block, flat_slots
from gradwire.local.world import LocalWorld
from gradwire.memory import NONE, Feedback, Store
from kernel_inputs import BLOCKS, block_of, blocks, covered, gradients, memories, normal
from together import together


def with_room(block: Block, share: float, sparsity: float = 1.0) -> ZeroRuns:
    store = Store(torch.device("cpu"))
    for slot in block.slots:
        store.put("room", slot.name, torch.tensor(share, dtype=torch.float64))
    return ZeroRuns(sparsity, Capacity(store=store))


rooms = together("share", [1.0, 0.3, 0.01])


@rooms
@blocks
@gradients
@memories
def test_is_the_reference(block: Block, gradient: Tensor, memory: tuple[float, float] | None, share: float) -> None:
    check_is_the_reference(with_room(block, share, 1.5), block, gradient, memory)


@rooms
@blocks
@gradients
def test_residual_is_what_was_not_sent(block: Block, gradient: Tensor, share: float) -> None:
    check_residual_is_what_was_not_sent(with_room(block, share), block, gradient)


@blocks
@gradients
def test_with_room_for_all_it_is_what_trits_say(block: Block, gradient: Tensor) -> None:
    plain, short = Quantiser(codes.ThreeLC(1.5)), ZeroRuns(1.5)
    assert short.payload_bytes(block) == plain.payload_bytes(block) + 4
    left, right = normal(99), normal(99)
    payload = encoded(plain, block, gradient, Feedback(left, 0.9, 0.3))
    other = encoded(short, block, gradient, Feedback(right, 0.9, 0.3))
    assert torch.equal(left, right)
    torch.testing.assert_close(
        decoded(short, block, other[None]), decoded(plain, block, payload[None]), rtol=0, atol=0, equal_nan=True
    )


def wanted(block: Block, payload: Tensor) -> int:
    head = 4 * block.segment_count
    return int(payload[head : head + 4].view(torch.int32))


def test_room_follows_the_neediest() -> None:
    block = BLOCKS["large"]
    stride = trits_stride(block.positions)
    codec = with_room(block, 1.0)
    sparse, rich = normal() ** 5, normal(2)

    def share() -> float:
        assert codec.room.store is not None
        first, second = (codec.room.store.get("room", slot.name) for slot in block.slots)
        assert first is not None
        assert first == second
        return float(first)

    def step(*values: Tensor) -> list[int]:
        payloads = torch.stack([encoded(codec, block, each, NONE) for each in values])
        codec.decode(block, payloads, torch.zeros_like(values[0]), 1.0)
        codec.heard(block, codec.news(block, payloads)[None])
        return [wanted(block, payload) for payload in payloads]

    few, many = step(sparse, rich)
    assert few < many / 2
    assert share() == pytest.approx(SPARE * many / stride)
    before = share()
    step(sparse)
    assert share() == pytest.approx(max(SPARE * few / stride, SHRINK * before))
    bad = sparse.clone()
    bad[100] = torch.nan
    before = share()
    step(sparse, bad)
    assert share() == before
    step(torch.where(normal() > 0, 1.0, -1.0))
    assert share() == 1


def test_news_that_no_codec_tells_keep_rooms_possible() -> None:
    for news in (-3.0, 0.0, 1e30):
        codec = with_room(BLOCKS["large"], 0.4)
        codec.heard(BLOCKS["large"], torch.tensor([[news], [0.1]]).view(torch.uint8))
        size = codec.payload_bytes(BLOCKS["large"])
        assert size % 4 == 0
        assert 0 < size <= ZeroRuns().payload_bytes(BLOCKS["large"])


@settings(max_examples=150, deadline=None)
@given(
    content=st.lists(st.one_of(st.just(255), st.just(121), st.integers(0, 255)), min_size=1, max_size=40),
    count=st.integers(-2, 60),
    share=st.sampled_from([1.0, 0.2]),
)
def test_any_bytes_are_read_alike_or_refused_alike(content: list[int], count: int, share: float) -> None:
    block = block_of([101, 40])
    codec = with_room(block, share)
    payload = encoded(codec, block, normal(), NONE)
    head = 4 * block.segment_count
    payload[head : head + 4].view(torch.int32).fill_(count)
    room = payload.numel() - head - 4
    payload[head + 4 :] = torch.tensor(content, dtype=torch.uint8).repeat(room)[:room]
    try:
        out = decoded(codec, block, payload[None])
    except PayloadError:
        with pytest.raises(PayloadError):
            decoded_by_the_reference(codec, block, payload)
    else:
        assert out[covered(block)].isfinite().all()


def decoded_by_the_reference(codec: Codec, block: Block, payload: Tensor) -> None:
    out = normal(1)
    with by_the_reference():
        codec.decode(block, payload[None], out, 1.0)


@pytest.mark.parametrize("count", [-1, 1 << 30])
def test_counts_that_no_encoder_writes_are_refused(count: int) -> None:
    block = block_of([1000])
    payload = encoded(ZeroRuns(), block, normal(), NONE)
    payload[4:8].view(torch.int32).fill_(count)
    with pytest.raises(PayloadError, match=str(count)):
        decoded(ZeroRuns(), block, payload[None])


@pytest.mark.parametrize("route", ["sharded", "gather"])
def test_steps_after_the_first_are_shorter_on_every_route(route: str) -> None:
    """All ranks agree on every size, or their payloads could not be stacked; a quiet parameter that wakes up waits."""
    slots = flat_slots([("quiet", (60, 70)), ("loud", (300, 40))])
    world = LocalWorld(Configuration.make("3lc", {"sparsity": 1.9}, route=route), slots, 3)
    written, put_in, taken_out = [], torch.zeros(slots[-1].stop), torch.zeros(slots[-1].stop)
    for step in range(8):
        values = [torch.randn(slots[-1].stop, generator=torch.Generator().manual_seed(9 * step + r)) for r in range(3)]
        for rank, each in enumerate(values):
            each[: slots[0].stop].mul_(0 if step < 6 else 1).pow_(2 * (step % 2) + 1)
            if rank != 1:
                each[slots[1].offset :].mul_(1e-3)
            put_in += each / 3
        written.append(world.average(values).written_bytes)
        assert torch.equal(values[0], values[2])
        taken_out += values[0]
    uncoded = written[0]
    assert max(written[2:6]) < uncoded / 2
    owed = sum(residual_of(engine) for engine in world.engines) / 3
    if route == "gather":
        torch.testing.assert_close(taken_out + owed, put_in, rtol=0, atol=1e-4)


def residual_of(engine: object) -> Tensor:
    kept = engine.store.state()["residual"]  # type: ignore[attr-defined]
    return torch.cat([kept[name].flatten() for name in ("quiet", "loud")])


def test_state_goes_on() -> None:
    """Rooms are part of the state: a restarted pair of ranks writes what the pair would have written."""
    slots = flat_slots([("a", (50, 60))])
    configuration = Configuration.make("3lc", {})
    first, second = LocalWorld(configuration, slots, 2), LocalWorld(configuration, slots, 2)

    def gradient(step: int) -> list[Tensor]:
        return [torch.randn(3000, generator=torch.Generator().manual_seed(2 * step + rank)) for rank in range(2)]

    for step in range(4):
        first.average(gradient(step))
    for old, new in zip(first.engines, second.engines, strict=True):
        new.store.load(old.store.state(), old.store.kinds())
        new.step = old.step
    expected, found = gradient(5), gradient(5)
    sizes = first.average(expected).written_bytes, second.average(found).written_bytes
    assert sizes[0] == sizes[1]
    assert torch.equal(expected[0], found[0])


def test_sparsity_out_of_range() -> None:
    with pytest.raises(gradwire.ConfigurationError, match="sparsity"):
        ZeroRuns(2.0)
