"""Payloads whose number of entries depends on the data: capacity, overflow, marks, malformed bytes."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire
from gradwire.codecs.adaptive import AdaptiveSparse
from gradwire.codecs.quantize import values
from gradwire.codecs.quantize.values import ValueCoding
from gradwire.codecs.select import EitherSide, Fixed
from gradwire.errors import ConfigurationError, PayloadError
from gradwire.layout import Block, Granularity, flat_slots
from gradwire.memory import NONE, Feedback, Store
from pool import ranks
from together import together

SLOTS = flat_slots([("matrix", (30, 50)), ("vector", (77,))])
BLOCK = Block.cut(SLOTS, Granularity("layer"))
NUMEL = SLOTS[-1].stop


def normal(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def encoded(codec: AdaptiveSparse, gradient: torch.Tensor, feedback: Feedback = NONE) -> torch.Tensor:
    payload = torch.full((codec.payload_bytes(BLOCK),), 0xA5, dtype=torch.uint8)
    codec.encode(BLOCK, gradient, feedback, payload, 0)
    return payload


def decoded(codec: AdaptiveSparse, *payloads: torch.Tensor) -> torch.Tensor:
    out = torch.full((NUMEL,), 7.0)
    codec.decode(BLOCK, torch.stack(payloads), out, 1 / len(payloads))
    return out


def test_capacity_follows_the_most_that_any_rank_wanted() -> None:
    store = Store(torch.device("cpu"))
    codec = AdaptiveSparse(Fixed(1.0), 0.02).installed(store, SLOTS, NUMEL)
    assert codec.room(BLOCK) == 30 + 16
    first, second = normal(0), normal(1) * 0.5
    payloads = [encoded(codec, first), encoded(codec, second)]
    decoded(codec, *payloads)
    wanted = [int((each.abs() >= 1).sum()) for each in (first[:1500], second[:1500])]
    assert int(store.get("capacity", "matrix")) == -(-5 * max(wanted) // 4)
    assert int(store.get("capacity", "vector")) == max(16, -(-5 * int((first[1500:].abs() >= 1).sum()) // 4))
    everything = decoded(codec, encoded(codec, first))
    assert torch.equal(everything, torch.where(first.abs() >= 1, first, 0))
    before = codec.room(BLOCK)
    decoded(codec, encoded(codec, torch.zeros(NUMEL)))
    assert before / 2 <= codec.room(BLOCK) <= before / 2 + 16
    for _ in range(9):
        decoded(codec, encoded(codec, torch.zeros(NUMEL)))
    assert codec.room(BLOCK) == 16 + 16
    decoded(codec, encoded(codec, torch.full((NUMEL,), 5.0)))
    assert codec.room(BLOCK) == NUMEL


def test_what_does_not_fit_waits_and_the_largest_go_first() -> None:
    codec = AdaptiveSparse(Fixed(0.1), 0.02)
    residual = torch.zeros(NUMEL)
    gradient = normal(0)
    out = decoded(codec, encoded(codec, gradient, Feedback(residual)))
    assert int((out != 0).sum()) == codec.room(BLOCK) == 46
    assert torch.equal(out + residual, gradient)
    assert out[out != 0].abs().min() >= residual.abs().max()


def test_a_mark_reaches_every_decoder_even_if_nothing_else_does() -> None:
    store = Store(torch.device("cpu"))
    codec = AdaptiveSparse(Fixed(100.0), 0.02).installed(store, SLOTS, NUMEL)
    bad = normal(0)
    bad[1510] = torch.inf
    residual = torch.zeros(NUMEL)
    out = decoded(codec, encoded(codec, normal(1)), encoded(codec, bad, Feedback(residual)))
    assert out[:1500].isfinite().all()
    assert out[1500:].isnan().all()
    assert torch.equal(residual, bad.masked_fill(~bad.isfinite(), 0))
    assert int(store.get("capacity", "vector")) == 16


@together("coding", ["fp32", "fp16", "sign", "qsgd:4"])
@pytest.mark.parametrize("granularity", ["layer", "bucket", "block:96"])
def test_any_count_fits(coding: str, granularity: str) -> None:
    block = Block.cut(SLOTS, Granularity.parse(granularity))
    codec = AdaptiveSparse(Fixed(0.5), 0.02, values.parse(coding))
    for scale in (0.0, 0.1, 0.2, 0.4, 1.0, 30.0):
        gradient, residual = normal(3) * scale, torch.zeros(NUMEL)
        payload = torch.full((codec.payload_bytes(block),), 0xA5, dtype=torch.uint8)
        codec.encode(block, gradient, Feedback(residual), payload, 5)
        out = torch.full((NUMEL,), 7.0)
        codec.decode(block, payload[None], out, 1.0)
        torch.testing.assert_close(out + residual, gradient)


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12), more=st.integers(0, 50))
@pytest.mark.parametrize(
    "coding", ["fp16", "sign", "onebit", "qsgd:2", "qsgd:4", "exponent", "natural", "terngrad", "3lc", "quantile:16"]
)
def test_bound_of_values_is_enough(coding: str, lengths: list[int], more: int) -> None:
    parsed: ValueCoding = values.parse(coding)
    size = parsed.size(Block.dense("test", np.array(lengths)))
    assert size <= parsed.bound(sum(lengths) + more, len(lengths))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("indices", ["elias-fano", "raw"])
def test_malformed_payloads_are_rejected_before_anything_is_written(indices: str, data: st.DataObject) -> None:
    codec = AdaptiveSparse(Fixed(1.0), 0.05, indices=gradwire_index(indices))
    payload = encoded(codec, normal(0))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    out = torch.full((NUMEL + 10,), 7.0)
    try:
        codec.decode(BLOCK, payload[None], out[:NUMEL], 1.0)
    except PayloadError:
        assert (out == 7).all()
    assert (out[NUMEL:] == 7).all()


def gradwire_index(name: str) -> Any:
    from gradwire.codecs import index

    return index.parse(name)


def test_counts_beyond_a_parameter_are_rejected() -> None:
    codec = AdaptiveSparse(Fixed(1.0), 0.05)
    payload = encoded(codec, normal(0))
    payload[:4].view(torch.int32).fill_(1501)
    with pytest.raises(PayloadError, match="counts more"):
        decoded(codec, payload)


@pytest.mark.parametrize("capacity", [0.0, -1, 1.5, float("nan")])
def test_capacity_is_checked(capacity: float) -> None:
    with pytest.raises(ConfigurationError, match="capacity"):
        gradwire.methods.get("threshold")(capacity=capacity)


@pytest.mark.parametrize("threshold", [0.0, -1, float("inf"), 1e-60, 1e60])
def test_threshold_is_checked(threshold: float) -> None:
    with pytest.raises(ConfigurationError, match="threshold"):
        gradwire.methods.get("threshold")(threshold=threshold)


OPTIONS: dict[str, dict[str, Any]] = {
    "threshold": {"threshold": 1.5},
    "adaptive": {},
    "gaussiank": {"ratio": 0.05},
    "sidco": {"ratio": 0.05},
    "strom": {"threshold": 1.0},
    "variance": {},
    "hybrid": {"threshold": 0.3},
    "adacomp": {"bin": 30},
}


@pytest.mark.parametrize("name", OPTIONS)
@ranks(2)
def test_resume_is_bit_identical(name: str) -> None:
    """Six steps in one go end with the bits of three, a saved state, and three more in a fresh handle."""
    rank = dist.get_rank()

    def handle() -> tuple[Any, list[tuple[str, torch.nn.Parameter]]]:
        named = [("w", torch.nn.Parameter(torch.zeros(40, 50))), ("x", torch.nn.Parameter(torch.zeros(30, 60)))]
        return gradwire.Synchronizer(named, name, **OPTIONS[name]), named

    def run(sync: Any, named: Any, steps: range) -> list[bytes]:
        found = []
        for step in steps:
            for index, (_, parameter) in enumerate(named):
                generator = torch.Generator().manual_seed(100 * step + 10 * rank + index)
                parameter.grad = torch.randn(parameter.shape, generator=generator) + 0.3
            sync.synchronize()
            found.append(b"".join(parameter.grad.numpy().tobytes() for _, parameter in named))
        return found

    sync, named = handle()
    run(sync, named, range(3))
    state = sync.state_dict()
    whole = run(sync, named, range(3, 6))
    sync.close()
    sync, named = handle()
    run(sync, named, range(2))
    sync.load_state_dict(state)
    assert run(sync, named, range(3, 6)) == whole
    sync.close()
    sync, named = handle()
    sync.load_state_dict(state)
    assert run(sync, named, range(3, 6)) == whole
    sync.close()


def test_adaptive_keeps_what_is_at_least_half_the_largest() -> None:
    for scale in (1.0, 1e-41, 3e-45, 1e37):
        tensor = (normal(5)[:1500] * scale).view(30, 50)
        decoded = gradwire.roundtrip(tensor, "adaptive", capacity=1.0).decoded
        kept = 2 * tensor.double().abs() >= tensor.double().abs().max()
        assert torch.equal(decoded, torch.where(kept & (tensor != 0), tensor, 0))


def test_strom_sends_whole_steps() -> None:
    tensor = normal(6)[:1500]
    decoded = gradwire.roundtrip(tensor, "strom", threshold=0.7, capacity=1.0).decoded
    assert torch.equal(decoded, torch.where(tensor.abs() > 0.7, tensor.sign() * 0.7, 0))
    assert gradwire.roundtrip(torch.full((64,), 0.5), "strom", threshold=0.5).decoded.count_nonzero() == 0


@pytest.mark.parametrize(("power", "looks"), [(0.5, 3), (1, 1), (1.5, 3), (2, 2)])
def test_gaussiank_brings_its_threshold_nearer_as_the_authors_code_does(power: float, looks: int) -> None:
    """Lighter tails than a normal distribution's halve it, heavier ones raise it by half."""
    tensor = torch.randn(20_000, generator=torch.Generator().manual_seed(4))
    tensor = tensor.abs() ** power * tensor.sign()
    threshold, done = NormalDist(0, tensor.double().square().mean().sqrt().item()).inv_cdf(0.995), 0
    while done < 3:
        reaching, done = tensor.abs() > threshold, done + 1
        if reaching.sum() < 2 * 200 / 3:
            threshold *= 0.5
        elif reaching.sum() > 4 * 200 / 3:
            threshold *= 1.5
        else:
            break
    assert done == looks
    found = gradwire.roundtrip(tensor, "gaussiank", ratio=0.01, capacity=1.0).decoded
    assert torch.equal(found, torch.where(reaching, tensor, 0))


def test_gaussiank_sends_something_of_whatever_it_is_given() -> None:
    for tensor in (torch.ones(500), torch.eye(30), torch.full((64,), 1e-30)):
        assert gradwire.roundtrip(tensor, "gaussiank").decoded.any()
    tensor = normal(1)[:500]
    assert torch.equal(gradwire.roundtrip(tensor, "gaussiank", ratio=1.0).decoded, tensor)


def sidco_counts(tensor: torch.Tensor, ratio: float, steps: int) -> list[int]:
    """How many coordinates of the same gradient are wanted in each step, without a memory."""
    block = Block.cut(flat_slots([("x", (len(tensor),))]), Granularity("layer"))
    store = Store(torch.device("cpu"))
    criterion = gradwire.methods.get("sidco")(ratio=ratio).codec().criterion.installed(store, block.slots, len(tensor))
    return [len(criterion.choose(block, tensor, NONE, 0, 0).positions) for _ in range(steps)]


@pytest.mark.parametrize("power", [0.5, 1])
def test_sidco_finds_its_ratio(power: int) -> None:
    """Exponential magnitudes at once, lighter tails once stages have adapted."""
    generator = torch.Generator().manual_seed(1)
    exponential = torch.empty(100_000).exponential_(generator=generator)
    assert abs(sidco_counts(exponential, 0.01, 1)[0] - 1000) < 5 * 1000**0.5
    counts = sidco_counts(torch.randn(100_000, generator=generator).abs() ** power, 0.01, 60)
    assert abs(counts[-1] - 1000) < 0.35 * 1000
    assert abs(counts[-1] - 1000) < abs(counts[0] - 1000)


def test_sidco_sends_all_at_a_ratio_of_one() -> None:
    """Whose threshold is zero, which all but zeros reach; and the room is what is said, however large it is."""
    tensor = torch.randn(500, generator=torch.Generator().manual_seed(2))
    for options in ({"ratio": 1.0}, {"ratio": 0.7}, {"ratio": 0.1, "capacity": 0.5}):
        found = gradwire.check("sidco", **options)
        assert found.holds, str(found)
    assert torch.equal(gradwire.roundtrip(tensor, "sidco", ratio=1.0).decoded, tensor)


def test_variance_sends_nothing_at_first_and_what_agrees_later() -> None:
    """A constant gradient is unambiguous as soon as ``t**2 > alpha * t``; noise around zero is not."""
    store = Store(torch.device("cpu"))
    codec = gradwire.methods.get("variance")(alpha=1.5, decay=1.0, capacity=1.0, values="fp32").codec()
    codec = replace(codec.installed(store, SLOTS, NUMEL), store=None)
    feedback = Feedback(torch.zeros(NUMEL))
    for turn in range(3):
        gradient = torch.where(torch.arange(NUMEL) < 100, 0.1, 0.1 * (-1.0) ** turn)
        out = decoded(codec, encoded(codec, gradient, feedback))
        assert out[100:].count_nonzero() == 0
        assert out[:100].count_nonzero() == (100 if turn == 1 else 0)
    assert torch.allclose(store.get("second_moments", "vector"), torch.full((77,), 0.03))


def test_hybrid_is_what_the_paper_says() -> None:
    """Step by step in float64."""
    store, tau, alpha, decay = Store(torch.device("cpu")), 0.6, 1.2, 0.9
    codec = gradwire.methods.get("hybrid")(threshold=tau, alpha=alpha, decay=decay, capacity=1.0).codec()
    codec = replace(codec.installed(store, SLOTS, NUMEL), store=None)
    feedback = Feedback(torch.zeros(NUMEL))
    r, v = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    total = 0
    for step in range(6):
        gradient = normal(step) * 0.3 + 0.2
        out = decoded(codec, encoded(codec, gradient, feedback))
        r, v = r + gradient, v + gradient.double() ** 2
        sent = (r.abs() > tau) & (r**2 > alpha * v)
        assert torch.equal(out, torch.where(sent, r.sign().float() * tau, 0))
        v = torch.where(sent, (v - 2 * r.abs() * tau + tau**2).clamp(min=0), v * decay)
        r = torch.where(sent, r - r.sign() * tau, r)
        torch.testing.assert_close(
            store.get("second_moments", "matrix").flatten().double(), v[:1500], rtol=1e-4, atol=1e-5
        )
        total += int(sent.sum())
    assert total > 300


def test_adacomp_is_what_the_paper_says() -> None:
    residual = normal(1)[:1500] * 0.3
    gradient = normal(2)[:1500] * 0.1
    block = Block.cut(SLOTS[:1], Granularity("layer"))
    codec = gradwire.methods.get("adacomp")(bin=500, capacity=1.0).codec()
    grown = residual + gradient
    payload = torch.empty(codec.payload_bytes(block), dtype=torch.uint8)
    codec.encode(block, gradient, Feedback(residual), payload, 0)
    out = torch.empty(1500)
    codec.decode(block, payload[None], out, 1.0)
    largest = grown.abs().view(3, 500).amax(1)
    sent = (grown + gradient).abs().view(3, 500) >= largest[:, None]
    assert 3 <= sent.sum() < 100
    torch.testing.assert_close(out, torch.where(sent.flatten(), grown.sign() * largest.mean(), 0))
    torch.testing.assert_close(out + residual, grown)


@pytest.mark.parametrize("ratio", [0.01, 0.2, 1.0])
def test_dryden_takes_the_same_share_of_either_side(ratio: float) -> None:
    tensor = normal(7)[:1500] + 0.4
    tensor[:300] = 0
    decoded = gradwire.roundtrip(tensor, "dryden", ratio=ratio).decoded
    above, below = int((tensor > 0).sum()), int((tensor < 0).sum())
    count = round(1500 * ratio)
    positive = round(min(count, above + below) * above / (above + below))
    negative = min(count, above + below) - positive
    zeros = count - positive - negative  # they go with the positive ones
    for side, result, most in ((tensor, decoded, positive), (-tensor, -decoded, negative)):
        largest = side.topk(most)
        mean = float(largest.values.sum()) / (most + (zeros if side is tensor else 0))
        torch.testing.assert_close(result[largest.indices], torch.full((most,), mean))
    assert int((decoded < 0).sum()) == negative
    assert int((decoded > 0).sum()) == positive + zeros


@pytest.mark.parametrize("shift", [0.0, 0.3, 5.0])
@pytest.mark.parametrize("granularity", ["layer", "bucket", "block:96"])
def test_either_side_is_exact_in_every_segment(granularity: str, shift: float) -> None:
    """Also where twice as many of both sides together do not hold enough of one."""
    block = Block.cut(SLOTS, Granularity.parse(granularity))
    selector, source = EitherSide(0.11), normal(8) + shift
    counts = selector.counts(block)
    positions, chosen = torch.empty(counts.sum(), dtype=torch.int64), torch.empty(counts.sum())
    selector.select(block, source, NONE, counts, positions, chosen)
    first = 0
    for segment, count in enumerate(counts.tolist()):
        runs = block.runs[block.segments[segment] : block.segments[segment + 1]]
        t = torch.cat([source[start : start + length] for start, length, _ in runs])
        places = torch.cat([torch.arange(place, place + length) for _, length, place in runs])
        positive = round(count * int((t > 0).sum()) / len(t))
        expected = torch.cat([t.clamp(min=0).topk(positive).indices, (-t).clamp(min=0).topk(count - positive).indices])
        expected = expected.sort().values
        assert torch.equal(positions[first : first + count], places[expected])
        assert torch.equal(chosen[first : first + count], t[expected])
        first += count
