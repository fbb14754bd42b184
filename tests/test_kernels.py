import math
import sys
from collections.abc import Sequence

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.errors import PayloadError
from gradwire.kernels import cpu, reference
from gradwire.layout import Block, Granularity, Slot
from gradwire.randomness import SHARED, hash32, key_of, mix64, run_keys

KEY = key_of(7, 11, 3)
BUFFER = 12_000


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cpu.warm_up()


def block_of(lengths: Sequence[int], granularity: str = "layer", hole: int = 3) -> Block:
    slots, offset = [], 2
    for index, length in enumerate(lengths):
        slots.append(Slot(f"parameter{index}", (length,), offset))
        offset += length + hole
    return Block.cut(slots, Granularity.parse(granularity))


BLOCKS = {
    "empty": block_of([]),
    "one element": block_of([1]),
    "odd layers": block_of([5, 64, 1, 4097, 33]),
    "one bucket": block_of([5, 64, 1, 4097, 33], "bucket"),
    "small blocks": block_of([5, 64, 1, 1003, 33], "block:100"),
    "large": block_of([9001, 700]),
    "large bucket": block_of([300, 9001, 700], "bucket"),
    "shard": block_of([300, 4097, 700]).shards(3)[1],
    "packed shard": block_of([300, 4097, 700], "bucket").shards(3)[2].packed(),
    "empty shard": block_of([3]).shards(4)[0],
}


def normal(seed: int = 0) -> Tensor:
    return torch.randn(BUFFER, generator=torch.Generator().manual_seed(seed))


def with_values(seed: int, values: Sequence[float], share: float = 0.05) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(values), (BUFFER,), generator=generator)
    return torch.where(torch.rand(BUFFER, generator=generator) < share, torch.tensor(values)[chosen], normal(seed))


GRADIENTS = {
    "normal": normal(),
    "zeros": torch.zeros(BUFFER),
    "signed zeros": with_values(1, [0.0, -0.0], 1.0),
    "mostly zeros": with_values(2, [0.0], 0.995),
    "ties": normal().mul(2).round(),
    "denormals": normal() * 1e-40,
    "huge": with_values(3, [1e38, -1e38, 3.4028234e38], 0.5),
    "one outlier": normal().index_fill(0, torch.tensor([40]), 1e30),
    "nan": normal().index_fill(0, torch.tensor([9]), math.nan),
    "many infinities": with_values(4, [math.inf, -math.inf, math.nan], 0.001),
}

blocks = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
gradients = pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS.keys())
memories = pytest.mark.parametrize("memory", [None, (0.9, 0.3)], ids=["none", "weighted"])


def same(first: Tensor, second: Tensor) -> bool:
    """Equal bit for bit, but for which NaN it is."""
    if first.is_floating_point():
        nan = first.isnan()
        return torch.equal(nan, second.isnan()) and torch.equal(
            first.masked_fill(nan, 0).view(torch.int32), second.masked_fill(nan, 0).view(torch.int32)
        )
    return torch.equal(first, second)


def residuals(memory: tuple[float, float] | None) -> tuple[Tensor | None, Tensor | None, float, float]:
    if memory is None:
        return None, None, 1.0, 1.0
    return normal(99), normal(99), *memory


def counts_of(block: Block, share: float) -> np.ndarray:
    return np.ceil(block.segment_numels * share).astype(np.int64)


def covered(block: Block) -> Tensor:
    mask = torch.zeros(BUFFER, dtype=torch.bool)
    for part in block.parts(mask):
        part.fill_(True)
    return mask


def strided(size: int, rows: int) -> Tensor:
    return torch.full((rows, size + 8), 0xA5, dtype=torch.uint8)[:, 4 : 4 + size]


@blocks
@gradients
@memories
def test_sign_is_the_reference(block: Block, gradient: Tensor, memory: tuple[float, float] | None) -> None:
    left, right, beta, gamma = residuals(memory)
    payloads = strided(cpu.sign_payload_bytes(block), 3)
    expected = torch.full_like(payloads[0], 0x5A)
    cpu.sign_encode(block, gradient, left, beta, gamma, payloads[1])
    reference.sign_encode(block, gradient, right, beta, gamma, expected)
    assert same(payloads[1], expected)
    assert left is None or same(left, right)
    cpu.sign_encode(block, normal(5), None, 1.0, 1.0, payloads[0])
    cpu.sign_encode(block, normal(6), None, 1.0, 1.0, payloads[2])
    for rows in (payloads, payloads[1:2]):
        out, other = normal(1), normal(1)
        cpu.sign_decode(block, rows, out, 1 / 3)
        reference.sign_decode(block, rows, other, 1 / 3)
        assert same(out, other)
        assert same(out[~covered(block)], normal(1)[~covered(block)])


ROUNDINGS = [(2, 512, False), (4, 0, False), (4, 64, True), (8, 100, False), (8, 0, True), (4, 5000, False)]


@blocks
@gradients
@pytest.mark.parametrize("turn", range(2))
def test_stochastic_is_the_reference(block: Block, gradient: Tensor, turn: int) -> None:
    number = list(BLOCKS.values()).index(block) + 2 * turn
    bits, bucket, euclidean = ROUNDINGS[number % len(ROUNDINGS)]
    left, right, beta, gamma = residuals((0.9, 0.3) if turn else None)
    payloads = strided(cpu.stochastic_payload_bytes(block, bits, bucket), 2)
    expected = torch.full_like(payloads[0], 0x5A)
    cpu.stochastic_encode(block, gradient, left, beta, gamma, payloads[1], bits, bucket, euclidean, KEY)
    reference.stochastic_encode(block, gradient, right, beta, gamma, expected, bits, bucket, euclidean, KEY)
    assert same(payloads[1], expected)
    assert left is None or same(left, right)
    cpu.stochastic_encode(block, normal(5), None, 1.0, 1.0, payloads[0], bits, bucket, euclidean, KEY)
    out, other = normal(1), normal(1)
    cpu.stochastic_decode(block, payloads, out, 0.3, bits, bucket)
    reference.stochastic_decode(block, payloads, other, 0.3, bits, bucket)
    assert same(out, other)
    assert same(out[~covered(block)], normal(1)[~covered(block)])


@pytest.mark.parametrize(("bits", "bucket", "euclidean"), ROUNDINGS)
@memories
@pytest.mark.parametrize("name", ["large bucket", "odd layers"])
def test_every_rounding_is_the_reference(
    name: str, memory: tuple[float, float] | None, bits: int, bucket: int, euclidean: bool
) -> None:
    block = BLOCKS[name]
    left, right, beta, gamma = residuals(memory)
    payload = torch.zeros(2, cpu.stochastic_payload_bytes(block, bits, bucket), dtype=torch.uint8)
    for seed in range(3):
        cpu.stochastic_encode(block, normal(seed), left, beta, gamma, payload[0], bits, bucket, euclidean, seed)
        reference.stochastic_encode(block, normal(seed), right, beta, gamma, payload[1], bits, bucket, euclidean, seed)
        assert same(*payload)
        assert left is None or same(left, right)


@blocks
@gradients
@memories
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_topk_is_the_reference(
    block: Block, gradient: Tensor, memory: tuple[float, float] | None, share: float
) -> None:
    left, right, beta, gamma = residuals(memory)
    counts = counts_of(block, share)
    positions, values = torch.zeros(2, int(counts.sum()), dtype=torch.int64), torch.zeros(2, int(counts.sum()))
    cpu.topk_select(block, gradient, left, beta, gamma, counts, positions[0], values[0])
    reference.topk_select(block, gradient, right, beta, gamma, counts, positions[1], values[1])
    assert same(*positions)
    assert same(*values)
    if left is not None:
        assert same(left, right)
        cpu.subtract(block, left, positions[0], values[0])
        reference.subtract(block, right, positions[1], values[1])
        assert same(left, right)


@blocks
@gradients
def test_accumulate_is_the_reference(block: Block, gradient: Tensor) -> None:
    left, right = normal(99), normal(99)
    assert cpu.accumulate(block, gradient, left, 0.9, 0.3) == reference.accumulate(block, gradient, right, 0.9, 0.3)
    assert same(left, right)


@blocks
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_randomk_is_the_reference(block: Block, share: float) -> None:
    counts = counts_of(block, share)
    positions = torch.zeros(2, int(counts.sum()), dtype=torch.int64)
    cpu.randomk_positions(block, counts, positions[0], KEY)
    reference.randomk_positions(block, counts, positions[1], KEY)
    assert same(*positions)
    assert positions[0].unique().numel() == positions.shape[1]
    values = torch.zeros(2, positions.shape[1])
    cpu.gather(block, normal(), positions[0], values[0])
    reference.gather(block, normal(), positions[0], values[1])
    assert same(*values)


@blocks
@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize("rows", [1, 3])
def test_scatter_sum_is_the_reference(block: Block, ascending: bool, rows: int) -> None:
    counts = counts_of(block, 0.2)
    positions = torch.zeros(rows, int(counts.sum()), dtype=torch.int64)
    values = torch.zeros(positions.shape)
    for row in range(rows):
        if ascending:
            cpu.topk_select(block, normal(row), None, 1.0, 1.0, counts, positions[row], values[row])
        else:
            cpu.randomk_positions(block, counts, positions[row], row)
            cpu.gather(block, normal(), positions[row], values[row])
    out, other = normal(1), normal(1)
    cpu.scatter_sum(block, positions, values, out, 1 / 3)
    reference.scatter_sum(block, positions, values, other, 1 / 3)
    assert same(out, other)
    assert same(out[~covered(block)], normal(1)[~covered(block)])


floats = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.tuples(floats, floats), min_size=1, max_size=90),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    granularity=st.sampled_from(["layer", "bucket", "block:7"]),
    weights=st.tuples(st.sampled_from([1.0, 0.9]), st.sampled_from([1.0, 0.1])),
    bits=st.sampled_from([2, 4, 8]),
    bucket=st.sampled_from([0, 8, 13]),
    euclidean=st.booleans(),
    share=st.floats(0, 1),
)
def test_any_values_are_the_reference(
    values: list[tuple[float, float]],
    cuts: list[int],
    granularity: str,
    weights: tuple[float, float],
    bits: int,
    bucket: int,
    euclidean: bool,
    share: float,
) -> None:
    block = block_of(cuts, granularity, hole=1)
    repeats = 200 // len(values) + 1
    gradient, residual = torch.tensor(values * repeats).T.contiguous()
    residual.nan_to_num_(0.0)
    for name, options in (("sign", ()), ("stochastic", (bits, bucket))):
        payloads = [torch.zeros(getattr(cpu, f"{name}_payload_bytes")(block, *options), dtype=torch.uint8)] * 2
        memories = [residual.clone(), residual.clone()]
        outs = [torch.zeros(gradient.shape), torch.zeros(gradient.shape)]
        for index, kernels in enumerate((cpu, reference)):
            payloads[index] = torch.zeros_like(payloads[index])
            extra = (*options, euclidean, KEY) if options else ()
            getattr(kernels, f"{name}_encode")(block, gradient, memories[index], *weights, payloads[index], *extra)
            getattr(kernels, f"{name}_decode")(block, payloads[index][None], outs[index], 0.7, *options)
        assert same(*payloads)
        assert same(*memories)
        assert same(*outs)
    counts = counts_of(block, share)
    positions, chosen = torch.zeros(2, int(counts.sum()), dtype=torch.int64), torch.zeros(2, int(counts.sum()))
    for index, kernels in enumerate((cpu, reference)):
        kernels.topk_select(block, gradient, residual.clone(), *weights, counts, positions[index], chosen[index])
    assert same(*positions)
    assert same(*chosen)


@pytest.mark.parametrize("kernels", [cpu, reference])
@pytest.mark.parametrize("name", ["sign", "stochastic"])
def test_residual_and_what_was_sent_are_the_compensated_values(kernels: object, name: str) -> None:
    """Within two roundings of values as large as the largest level."""
    block, gradient, residual = BLOCKS["odd layers"], normal(), normal(1)
    t = 0.5 * residual + 2 * gradient
    options = (8, 64) if name == "stochastic" else ()
    payload = torch.zeros(getattr(kernels, f"{name}_payload_bytes")(block, *options), dtype=torch.uint8)
    extra = (*options, False, KEY) if options else ()
    getattr(kernels, f"{name}_encode")(block, gradient, residual, 0.5, 2.0, payload, *extra)
    sent = torch.zeros(BUFFER)
    getattr(kernels, f"{name}_decode")(block, payload[None], sent, 1.0, *options)
    error = (residual + sent - t)[covered(block)].abs().max()
    assert error <= 2 * torch.finfo(torch.float32).eps * t.abs().max()


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_topk_leaves_exactly_what_it_did_not_send(kernels: object) -> None:
    block, gradient, residual = BLOCKS["odd layers"], normal(), normal(1)
    t = 0.5 * residual + 2 * gradient
    counts = counts_of(block, 0.1)
    positions, values = torch.zeros(1, int(counts.sum()), dtype=torch.int64), torch.zeros(1, int(counts.sum()))
    kernels.topk_select(block, gradient, residual, 0.5, 2.0, counts, positions[0], values[0])
    kernels.subtract(block, residual, positions[0], values[0])
    sent = torch.zeros(BUFFER)
    kernels.scatter_sum(block, positions, values, sent, 1.0)
    assert torch.equal((residual + sent)[covered(block)], t[covered(block)])


@pytest.mark.parametrize("numel", [1, 100, 4096, 4097, 100_001, 1_000_000])
@pytest.mark.parametrize("share", [0.001, 0.01, 0.5])
def test_topk_is_that_of_torch(numel: int, share: float) -> None:
    block = Block.cut([Slot("weight", (numel,), 0)], Granularity("layer"))
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    counts = counts_of(block, share)
    positions, values = torch.zeros(counts[0], dtype=torch.int64), torch.zeros(counts[0])
    cpu.topk_select(block, gradient, None, 1.0, 1.0, counts, positions, values)
    assert torch.equal(values, gradient[positions])
    assert torch.equal(positions, positions.unique())
    expected = gradient.abs().topk(int(counts[0])).values
    assert torch.equal(values.abs().sort(descending=True).values, expected)


def test_topk_where_the_sample_misleads() -> None:
    numel, count = 200_000, 2000
    block = Block.cut([Slot("weight", (numel,), 0)], Granularity("layer"))
    for gradient in (
        torch.linspace(0, 1, numel),
        torch.cat((torch.randn(count // 2), torch.zeros(numel - count // 2))),
        torch.cat((torch.zeros(numel - count - 1), torch.randn(count + 1))),
        torch.ones(numel),
    ):
        positions, values = torch.zeros(2, count, dtype=torch.int64), torch.zeros(2, count)
        for index, kernels in enumerate((cpu, reference)):
            kernels.topk_select(block, gradient, None, 1.0, 1.0, np.array([count]), positions[index], values[index])
        assert same(*positions)
        assert same(*values)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_stochastic_rounding_is_unbiased(bits: int) -> None:
    """The mean of ``n`` draws lies within 5 standard errors, of at most half a level each, of the true value."""
    numel, draws = 512, 1000
    block = Block.cut([Slot("weight", (numel,), 0)], Granularity("layer"))
    gradient = torch.linspace(-1, 1, numel)
    payload = torch.zeros(draws, cpu.stochastic_payload_bytes(block, bits, 0), dtype=torch.uint8)
    for draw in range(draws):
        cpu.stochastic_encode(block, gradient, None, 1.0, 1.0, payload[draw], bits, 0, False, key_of(0, draw, 0))
    mean = torch.zeros(numel)
    cpu.stochastic_decode(block, payload, mean, 1 / draws, bits, 0)
    level = 1 / (2 ** (bits - 1) - 1)
    error = mean - gradient
    assert error.abs().max() <= 5 * (level / 2) / math.sqrt(draws)
    assert error.mean().abs() <= 5 * (level / 2) / math.sqrt(draws * numel)
    assert mean[gradient == 0].eq(0).all()


@pytest.mark.parametrize("granularity", ["layer", "bucket", "block:16"])
def test_rounding_does_not_depend_on_segments(granularity: str) -> None:
    """With one scale for all, the codes of an element are the same however it is cut."""
    lengths = (64, 160)
    gradient = torch.sin(torch.arange(BUFFER)) * 0.9
    whole, cut = block_of(lengths), block_of(lengths, granularity)
    gradient[whole.runs[:, 0]] = 1.0
    gradient[cut.runs[:, 0]] = 1.0
    outs = []
    for block in (whole, cut):
        payload = torch.zeros(1, cpu.stochastic_payload_bytes(block, 4, 0), dtype=torch.uint8)
        outs.append(torch.zeros(BUFFER))
        cpu.stochastic_encode(block, gradient, None, 1.0, 1.0, payload[0], 4, 0, False, KEY)
        cpu.stochastic_decode(block, payload, outs[-1], 1.0, 4, 0)
    assert torch.equal(*outs)


def test_any_codes_decode_to_finite_values() -> None:
    block = BLOCKS["odd layers"]
    scales = torch.tensor([3.4028235e38, -3.4028235e38, 1.0, 1e-45, 3.4028235e38])
    for bits in (2, 4, 8):
        payload = torch.full((1, cpu.stochastic_payload_bytes(block, bits, 0)), 0xFF, dtype=torch.uint8)
        for byte in (0x00, 0xFF):
            payload.fill_(byte)
            payload[0, :20] = scales.view(torch.uint8)
            out, other = torch.zeros(BUFFER), torch.zeros(BUFFER)
            cpu.stochastic_decode(block, payload, out, 1.0, bits, 0)
            reference.stochastic_decode(block, payload, other, 1.0, bits, 0)
            assert out.isfinite().all()
            assert same(out, other)


@blocks
@pytest.mark.parametrize("name", ["sign", "stochastic"])
def test_values_that_are_not_finite_are_marked_and_not_kept(block: Block, name: str) -> None:
    if not block.segment_count:
        return
    start = int(block.runs[-1, 0])
    gradient, residual = normal(), normal(1)
    gradient[start] = math.inf
    t, old = residual + gradient, residual.clone()
    options = (4, 0) if name == "stochastic" else ()
    extra = (*options, False, KEY) if options else ()
    payload = torch.zeros(getattr(cpu, f"{name}_payload_bytes")(block, *options), dtype=torch.uint8)
    getattr(cpu, f"{name}_encode")(block, gradient, residual, 1.0, 1.0, payload, *extra)
    out = torch.zeros(BUFFER)
    getattr(cpu, f"{name}_decode")(block, payload[None], out, 1.0, *options)
    for start, length, _ in block.runs[block.segments[-2] :]:
        piece = slice(start, start + length)
        assert out[piece].isnan().all()
        assert torch.equal(residual[piece], torch.where(t.isfinite(), t, old)[piece])


def test_values_that_are_not_finite_count_as_not_sent() -> None:
    block, residual = block_of([8]), torch.ones(BUFFER)
    cpu.subtract(block, residual, torch.tensor([0, 1, 2]), torch.tensor([math.nan, math.inf, 0.25]))
    assert residual[2:6].tolist() == [1.0, 1.0, 0.75, 1.0]


def test_payload_sizes() -> None:
    block = block_of([5, 64, 17])
    assert block.positions == 96
    assert cpu.sign_payload_bytes(block) == 3 * 4 + 96 // 8
    assert cpu.stochastic_payload_bytes(block, 4, 0) == 3 * 4 + 48
    assert cpu.stochastic_payload_bytes(block, 8, 16) == (1 + 4 + 2) * 4 + 96
    assert cpu.stochastic_payload_bytes(block, 2, 512) == 3 * 4 + 24
    assert cpu.sign_payload_bytes(block_of([9])) == 4 + 4
    assert cpu.elias_fano_bytes(0, 1000) == 0
    assert cpu.elias_fano_bytes(10, 1000) == 8 + 4  # 10 * 6 low bits; 10 + (999 >> 6) high ones
    for count, universe in ((1, 1), (3, 3), (250, 25_000), (7, 2**40), (1000, 1023)):
        size = cpu.elias_fano_bytes(count, universe)
        assert size % 4 == 0
        if universe < 2**32:
            assert 8 * size <= count * (2 + math.log2(universe / count)) + 64


@settings(max_examples=80, deadline=None)
@given(data=st.data(), universe=st.sampled_from([1, 8, 100, 4096, 1 << 20, 1 << 33, 1 << 45]))
def test_elias_fano_roundtrip(data: st.DataObject, universe: int) -> None:
    chosen = data.draw(st.sets(st.integers(0, universe - 1), max_size=200))
    positions = torch.tensor(sorted(chosen), dtype=torch.int64)
    if universe > 1 << 33 and len(chosen) < 200:
        return
    payloads = torch.full((2, cpu.elias_fano_bytes(len(chosen), universe)), 0xFF, dtype=torch.uint8)
    for payload, kernels in zip(payloads, (cpu, reference), strict=True):
        kernels.elias_fano_encode(positions, universe, payload)
    assert same(*payloads)
    for kernels in (cpu, reference):
        decoded = torch.full_like(positions, -1)
        kernels.elias_fano_decode(payloads[0], universe, decoded)
        assert torch.equal(decoded, positions)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_malformed_elias_fano_bytes(data: st.DataObject) -> None:
    """Any bytes either decode, to valid positions, or are rejected, by both and without a write outside."""
    universe = data.draw(st.integers(1, 300))
    count = data.draw(st.integers(1, universe))
    size = cpu.elias_fano_bytes(count, universe)
    payload = torch.tensor(list(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    if data.draw(st.booleans()):
        payload[: size // 2] = 0xFF
    outcomes = []
    for kernels in (cpu, reference):
        memory = torch.full((count + 2,), -7)
        try:
            kernels.elias_fano_decode(payload, universe, memory[1:-1])
        except PayloadError:
            outcomes.append(None)
        else:
            outcomes.append(memory[1:-1].tolist())
            assert memory[1] >= 0
            assert memory[-2] < universe
            assert (memory[1:-1].diff() > 0).all()
        assert memory[0] == memory[-1] == -7
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_elias_fano_rejects(kernels: object) -> None:
    positions = torch.tensor([1, 5, 9])
    payload = torch.zeros(cpu.elias_fano_bytes(3, 16), dtype=torch.uint8)
    for wrong in ([1, 5, 16], [5, 1, 9], [1, 1, 9], [-1, 5, 9]):
        with pytest.raises(PayloadError):
            kernels.elias_fano_encode(torch.tensor(wrong), 16, payload)
    with pytest.raises(PayloadError):
        kernels.elias_fano_encode(positions, 16, torch.zeros(4, dtype=torch.uint8))
    for byte in (0x00, 0xFF):
        with pytest.raises(PayloadError):
            kernels.elias_fano_decode(torch.full_like(payload, byte), 16, positions)
    with pytest.raises(PayloadError):
        kernels.elias_fano_decode(payload[:4], 16, positions)


@pytest.mark.parametrize("kernels", [cpu, reference])
@pytest.mark.parametrize("block", [block_of([5, 20]), block_of([])], ids=["gaps", "empty"])
@pytest.mark.parametrize("bad", [-1, 5, 7, 28, 31, 32, 2**40, -(2**63)])
def test_positions_outside_the_runs_change_nothing(kernels: object, block: Block, bad: int) -> None:
    out = normal()
    positions = torch.tensor([[0, 9, bad]])
    values = torch.ones(1, 3)
    with pytest.raises(PayloadError):
        kernels.scatter_sum(block, positions, values, out, 1.0)
    with pytest.raises(PayloadError):
        kernels.subtract(block, out, positions[0], values[0])
    with pytest.raises(PayloadError):
        kernels.gather(block, out, positions[0], values[0])
    assert torch.equal(out, normal())


def test_randomk_positions_are_uniform() -> None:
    """Chi-square of how often each element is chosen, and each is first, within 5 standard deviations."""
    draws, count = 3000, 4
    for numel in (11, 16, 37):
        block = block_of([numel])
        chosen = np.zeros((2, numel))
        positions = torch.zeros(count, dtype=torch.int64)
        for draw in range(draws):
            cpu.randomk_positions(block, np.array([count]), positions, key_of(1, draw))
            chosen[0, positions.numpy()] += 1
            chosen[1, positions[0]] += 1
        for row, total in zip(chosen, (draws * count, draws), strict=True):
            chi_square = ((row - total / numel) ** 2 / (total / numel)).sum()
            assert chi_square <= numel - 1 + 5 * math.sqrt(2 * (numel - 1))


def test_keys_differ_and_repeat() -> None:
    keys = {key_of(seed, step, rank) for seed in range(8) for step in range(8) for rank in range(SHARED, 7)}
    assert len(keys) == 8 * 8 * 8
    assert all(0 <= key < 2**64 for key in keys)
    assert key_of(3, 4, 5) == key_of(3, 4, 5)
    assert key_of(-1, 2**63, SHARED) != key_of(-1, 2**63, 0)
    streams = np.array([Slot("a", (), 0).stream, 2**64 - 1], dtype=np.uint64)
    assert run_keys(KEY, streams).tolist() == [mix64(KEY ^ stream) for stream in streams.tolist()]


def test_hash_changes_half_the_bits() -> None:
    """Another counter or key changes each output bit in half of all cases, within 5 standard errors (plus 1 %)."""
    counters = torch.arange(20_000)
    bits = hash32(KEY, counters)
    others = [hash32(KEY, counters ^ 1 << bit) for bit in range(32)]
    others += [hash32(key_of(7, 11 + step, 3), counters) for step in range(1, 33)]
    for other in others:
        shares = (((bits ^ other)[:, None] >> torch.arange(32)) & 1).double().mean(0)
        assert (shares - 0.5).abs().max() <= 5 * 0.5 / math.sqrt(len(counters)) + 0.01


def test_warm_up_leaves_nothing_to_compile() -> None:
    """No test in this process before this one needed another signature than ``warm_up`` compiled."""
    cpu.warm_up()
    modules = [module for name, module in sys.modules.items() if name.startswith("gradwire.kernels.cpu.")]
    compiled = {
        f"{module.__name__}.{name}": function
        for module in modules
        for name, function in vars(module).items()
        if isinstance(function, numba.core.dispatcher.Dispatcher) and function.__module__ == module.__name__
    }
    assert {name: len(function.signatures) for name, function in compiled.items() if len(function.signatures) > 1} == {}


def test_torch_generator_is_not_touched() -> None:
    state = torch.get_rng_state()
    block = BLOCKS["odd layers"]
    counts = counts_of(block, 0.1)
    cpu.randomk_positions(block, counts, torch.zeros(int(counts.sum()), dtype=torch.int64), KEY)
    payload = torch.zeros(cpu.stochastic_payload_bytes(block, 4, 64), dtype=torch.uint8)
    cpu.stochastic_encode(block, normal(), None, 1.0, 1.0, payload, 4, 64, False, KEY)
    assert torch.equal(state, torch.get_rng_state())
