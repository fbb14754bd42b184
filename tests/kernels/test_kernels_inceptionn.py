"""INCEPTIONN: Numba against the reference, its bound, its room, and bytes that no encoder writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gradwire
from codec_checks import check_compiled_once, check_residual_is_what_was_not_sent
from gradwire.codecs.capacity import SPARE
from gradwire.codecs.quantize import Inceptionn
from gradwire.codecs.quantize.inceptionn import FIELD
from gradwire.errors import ConfigurationError, PayloadError
from gradwire.kernels import Compensated, cpu, reference
from gradwire.kernels.reference.inceptionn import MOST_DOUBLINGS, inceptionn_edges, inceptionn_offsets
from gradwire.layout import Block
from gradwire.memory import NONE, Store
from kernel_inputs import BLOCKS, BUFFER, blocks, covered, gradients, normal, residuals, same, strided
from together import together

BOUNDS = [1, 10, 14, 15, 40, 126]


@blocks
@gradients
@together("turn", range(2))
def test_is_the_reference(block: Block, gradient: Tensor, turn: int) -> None:
    number = list(BLOCKS.values()).index(block) + 3 * turn
    compare(block, gradient, (0.9, 0.3) if turn else None, BOUNDS[number % len(BOUNDS)], (4, 16)[number % 2])


def compare(block: Block, gradient: Tensor, memory: tuple[float, float] | None, bound: int, room: int) -> None:
    left, right, beta, gamma = residuals(memory)
    size = reference.inceptionn_payload_bytes(block, -(-block.numel * room // 32) * 4)
    assert size % 4 == 0
    payloads, expected = strided(size, 2), strided(size, 2)
    for row, values in enumerate((gradient, normal(5))):
        cpu.inceptionn_encode(block, Compensated(values, left, beta, gamma), payloads[row], bound)
        reference.inceptionn_encode(block, Compensated(values, right, beta, gamma), expected[row], bound)
        assert left is None or same(left, right)
    assert same(payloads, expected)
    out, other = normal(1), normal(1)
    cpu.inceptionn_decode(block, payloads, out, 1 / 3, bound)
    reference.inceptionn_decode(block, payloads, other, 1 / 3, bound)
    assert same(out, other)
    assert same(out[~covered(block)], normal(1)[~covered(block)])


@blocks
@gradients
def test_residual_is_what_was_not_sent(block: Block, gradient: Tensor) -> None:
    check_residual_is_what_was_not_sent(Inceptionn(room=8), block, gradient)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(width=32), min_size=120, max_size=120), st.sampled_from(BOUNDS), st.integers(1, 32))
def test_any_floats_are_the_references(values: list[float], bound: int, room: int) -> None:
    compare(BLOCKS["small blocks"], torch.tensor(values).repeat(100), (0.9, 0.3), bound, room)


@settings(deadline=None, max_examples=40)
@given(st.binary(min_size=1, max_size=40), st.integers(0, MOST_DOUBLINGS))
def test_any_bytes_are_read_alike_or_rejected_alike(content: bytes, doublings: int) -> None:
    block = BLOCKS["small blocks"]
    size = reference.inceptionn_payload_bytes(block, block.numel * 2 // 4 * 4)
    payload = torch.tensor(list(content), dtype=torch.uint8).repeat(size)[None, :size].clone()
    payload[0, :8].view(torch.int32)[:] = torch.tensor([doublings, 5])
    results = []
    for kernels in (cpu, reference):
        out = normal(1)
        try:
            kernels.inceptionn_decode(block, payload, out, 0.5, 10)
        except PayloadError:
            assert same(out, normal(1))
        results.append(out)
    assert same(*results)


def sent(codec: Inceptionn, gradient: Tensor) -> tuple[Tensor, Tensor]:
    block = BLOCKS["large"]
    payload = torch.empty(1, codec.payload_bytes(block), dtype=torch.uint8)
    codec.encode(block, gradient, NONE, payload[0], 0)
    out = torch.zeros(BUFFER)
    codec.decode(block, payload, out, 1.0)
    return out[covered(block)], payload[0]


@pytest.mark.parametrize("exponent", [1, 6, 8, 10, 14, 15, 20, 126])
def test_no_error_reaches_the_bound(exponent: int) -> None:
    scales = 2.0 ** torch.linspace(-30, 12, BUFFER)
    gradient = normal() * scales
    values = gradient[covered(BLOCKS["large"])]
    decoded, payload = sent(Inceptionn(2.0**-exponent, room=32), gradient)
    assert payload[0] == 0
    assert (decoded - values).abs().max() < 2.0**-exponent
    assert torch.equal(decoded[values.abs() < 2.0**-exponent], torch.zeros(int((values.abs() < 2.0**-exponent).sum())))
    assert ((decoded == 0) | (decoded.sign() == values.sign())).all()


def test_edges_are_the_published_ones() -> None:
    assert inceptionn_edges(10, 0) == (117, 122, 127)
    assert inceptionn_edges(8, 0) == (119, 123, 127)
    assert inceptionn_edges(6, 0) == (121, 124, 127)


def test_the_bound_is_doubled_until_it_fits() -> None:
    decoded, payload = sent(Inceptionn(2.0**-10, room=8), normal())
    doublings = int(payload[0])
    assert doublings > 0
    error = (decoded - normal()[covered(BLOCKS["large"])]).abs().max()
    assert 2.0**-11 < error < 2.0 ** (doublings - 10)


@pytest.mark.parametrize("room", [1, 2, 3])
@pytest.mark.parametrize("size", [1.0, 3e-3, 3e38])
def test_of_values_that_are_alike_the_first_are_sent_that_fit(room: int, size: float) -> None:
    """A bound that is larger leaves none of them."""
    alike, block = normal().sign() * size, BLOCKS["large"]
    decoded, _ = sent(Inceptionn(2.0**-10, room=room), alike)
    given, fitting = alike[covered(block)], -(-block.numel * room // 32) * 4
    assert decoded.nonzero().flatten().tolist() == [*range(fitting)]
    torch.testing.assert_close(decoded[:fitting], given[:fitting], rtol=0.1, atol=0)
    for each in BLOCKS.values():
        compare(each, alike, None, 10, room)
        compare(each, alike, (0.9, 0.3), 10, room)


def test_room_follows_what_was_wanted() -> None:
    """A quarter more than was needed, from the next step on; less of it while the gradient is smaller."""
    block, store = BLOCKS["large"], Store(torch.device("cpu"))
    sizes = []
    for step, scale in enumerate([1e-2, 1e-2, 1e-5, 1e-5, 1e-2, 1e-2]):
        codec = Inceptionn().installed(store, block.slots, BUFFER)
        payload = torch.empty(1, codec.payload_bytes(block), dtype=torch.uint8)
        codec.encode(block, normal() * scale, NONE, payload[0], 0)
        assert int(payload[0, 0]) == 0 or step == 4, "only what was not foreseen is cut"
        codec.decode(block, payload, torch.zeros(BUFFER), 1.0)
        sizes.append(payload.shape[1] - inceptionn_offsets(block)[1] - 4)
    assert sizes[0] == -(-2 * block.numel // 4) * 4
    assert sizes[1] == sizes[2] == sizes[5] < 0.8 * sizes[0]
    assert sizes[3] == sizes[4] == -(-block.numel // 32) * 4


def test_room_is_kept_by_parameter() -> None:
    """So a parameter takes it along into another bucket."""
    store = Store(torch.device("cpu"))
    for name, scale in (("odd layers", 1e-3), ("large", 1e-2)):
        block = BLOCKS[name]
        codec = Inceptionn().installed(store, (), BUFFER)
        payload = torch.empty(1, codec.payload_bytes(block), dtype=torch.uint8)
        codec.encode(block, torch.full((BUFFER,), scale), NONE, payload[0], 0)
        codec.decode(block, payload, torch.zeros(BUFFER), 1.0)
    rooms = store.state()[FIELD]
    assert rooms.keys() == {f"parameter{number}" for number in range(5)}
    assert [round(float(rooms[f"parameter{number}"])) for number in range(5)] == [10, 10, 10, 10, 10]
    bucket = BLOCKS["one bucket"]
    room = Inceptionn().installed(store, (), BUFFER).payload_bytes(bucket) - inceptionn_offsets(bucket)[1] - 4
    assert SPARE * bucket.numel <= room <= SPARE * bucket.numel + 8


@pytest.mark.parametrize("kernels", [cpu, reference], ids=["cpu", "reference"])
def test_other_payloads_are_rejected(kernels: Any) -> None:
    block = BLOCKS["odd layers"]
    good = torch.empty(1, reference.inceptionn_payload_bytes(block, 1000), dtype=torch.uint8)
    kernels.inceptionn_encode(block, Compensated(normal()), good[0], 10)
    for place, value, message in ((3, 1, "doubled"), (1, 1, "doubled"), (7, 0x80, "wanted"), (6, 1, "wanted")):
        bad, out = good.clone(), normal(1)
        bad[0, place] = value
        with pytest.raises(PayloadError, match=message):
            kernels.inceptionn_decode(block, bad, out, 1.0, 10)
        assert same(out, normal(1))
    tags, values = inceptionn_offsets(block)
    bad, out = good.clone(), normal(1)
    bad[0, tags:values] = 0xFF
    with pytest.raises(PayloadError, match="tags ask for"):
        kernels.inceptionn_decode(block, bad, out, 1.0, 10)
    assert same(out, normal(1))


@pytest.mark.parametrize("options", [{"bound": 0.3}, {"bound": 1.0}, {"bound": -0.5}, {"room": 0}, {"room": 33}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(options))}="):
        gradwire.methods.get("inceptionn")(**options)


def test_warm_up_compiled_all() -> None:
    check_compiled_once("inceptionn")
