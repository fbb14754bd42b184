"""Payloads whose number of entries depends on the data: capacity, overflow, marks, malformed bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire
from gradwire.adaptive import AdaptiveSparse
from gradwire.errors import ConfigurationError, PayloadError
from gradwire.layout import Block, Granularity, flat_slots
from gradwire.memory import NONE, Feedback, Store
from gradwire.quantize import values
from gradwire.quantize.values import ValueCoding
from gradwire.select import Fixed
from pool import Pool

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


@pytest.mark.parametrize("coding", ["fp32", "fp16", "sign", "qsgd:4"])
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
@pytest.mark.parametrize("coding", ["fp16", "sign", "qsgd:2", "qsgd:4"])
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
    from gradwire import index

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


OPTIONS: dict[str, dict[str, Any]] = {"threshold": {"threshold": 1.5}}


def resume(name: str) -> None:
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


@pytest.mark.parametrize("name", OPTIONS)
def test_resume_is_bit_identical(pool: Pool, name: str) -> None:
    pool.run(2, resume, name)
