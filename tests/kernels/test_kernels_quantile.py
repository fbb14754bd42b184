"""Quantile buckets and their sketch: Numba against the reference, and what theory says of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradwire.codecs.quantize import Quantile
from gradwire.codecs.quantize.values import CodedValues, parse
from gradwire.errors import ConfigurationError
from gradwire.kernels import Compensated, cpu, reference
from gradwire.kernels.reference.quantile import Form, group_edges
from gradwire.layout import Block
from gradwire.memory import NONE
from kernel_inputs import BLOCKS, BUFFER, KEY, blocks, gradients, normal, residuals, same, strided
from together import together

FORMS = [Form(4, 0, 0.3, 8), Form(256, 0, 0.3, 8), Form(16, 1, 0.05, 2), Form(256, 2, 0.3, 8)]
forms = pytest.mark.parametrize("form", FORMS, ids=str)


@blocks
@gradients
@together("turn", range(2))
def test_both_kernels_have_the_same_bits(block: Block, gradient: Tensor, turn: int) -> None:
    number = list(BLOCKS.values()).index(block) + 2 * turn
    compare(block, gradient, (0.9, 0.3) if turn else None, FORMS[number % len(FORMS)])


def compare(block: Block, gradient: Tensor, memory: tuple[float, float] | None, form: Form) -> None:
    ours, theirs, beta, gamma = residuals(memory)
    size = form.offsets(block)[-1]
    assert size % 4 == 0
    payloads, expected = strided(size, 2), strided(size, 2)
    for row in range(2):
        cpu.quantile_encode(block, Compensated(gradient, ours, beta, gamma), payloads[row], form, KEY + row)
        reference.quantile_encode(block, Compensated(gradient, theirs, beta, gamma), expected[row], form, KEY + row)
    assert torch.equal(payloads, expected)
    if ours is not None and theirs is not None:
        assert same(ours, theirs)
        assert ours.isfinite().all()
    decoded, wanted = torch.full((BUFFER,), 7.0), torch.full((BUFFER,), 7.0)
    cpu.quantile_decode(block, payloads, decoded, 0.5, form)
    reference.quantile_decode(block, payloads, wanted, 0.5, form)
    assert same(decoded, wanted)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(width=32, allow_nan=True), min_size=BUFFER // 100, max_size=BUFFER // 100), st.data())
def test_both_kernels_have_the_same_bits_on_any_floats(values: list[float], data: st.DataObject) -> None:
    block = data.draw(st.sampled_from([BLOCKS["odd layers"], BLOCKS["small blocks"]]))
    gradient = torch.tensor(values).repeat(100)
    compare(block, gradient, data.draw(st.sampled_from([None, (0.9, 0.3)])), data.draw(st.sampled_from(FORMS)))


@forms
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**30))
def test_any_bytes_decode_alike(form: Form, seed: int) -> None:
    block = BLOCKS["small blocks"]
    size = form.offsets(block)[-1]
    payloads = torch.randint(256, (2, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    decoded, wanted = torch.zeros(BUFFER), torch.zeros(BUFFER)
    cpu.quantile_decode(block, payloads, decoded, 0.5, form)
    reference.quantile_decode(block, payloads, wanted, 0.5, form)
    assert same(decoded, wanted)


def sent(codec: Quantile, gradient: Tensor, key: int = KEY) -> Tensor:
    block = BLOCKS["large"]
    payload = torch.empty(1, codec.payload_bytes(block), dtype=torch.uint8)
    codec.encode(block, gradient, NONE, payload[0], key)
    out = torch.zeros(BUFFER)
    codec.decode(block, payload, out, 1.0)
    return out[2:9003]


def test_buckets_are_equally_full_and_their_values_are_means() -> None:
    values = normal()[2:9003]
    decoded = sent(Quantile(16), normal())
    levels, counts = decoded.unique(return_counts=True)
    assert len(levels) == 16
    assert counts.max() - counts.min() <= 0.2 * counts.max(), "the two sides have their buckets rounded"
    for level in levels:
        torch.testing.assert_close(values[decoded == level].mean(), level)
    assert torch.equal(decoded < 0, values < 0)


def test_collisions_only_make_values_smaller() -> None:
    exact, sketched = sent(Quantile(256), normal()), sent(Quantile(256, rows=2, columns=0.3), normal())
    assert (sketched.abs() <= exact.abs()).all()
    assert torch.equal(sketched < 0, exact < 0)
    assert 0.1 < (sketched == exact).float().mean() < 0.9
    again = sent(Quantile(256, rows=2, columns=0.3), normal(), KEY + 1)
    assert not torch.equal(again, sketched), "other hashes every step"


def test_groups_bound_what_a_collision_costs() -> None:
    """By how far a value's group reaches: 8 groups have less than a fifth of the error of the two signs alone."""
    values, errors = normal()[2:9003], []
    for groups in (2, 8):
        error = sent(Quantile(256, 2, 0.3, groups), normal()) - values
        errors.append(error.norm() ** 2 / values.norm() ** 2)
    assert errors[1] < 0.2 * errors[0]
    decoded, exact = sent(Quantile(256, 2, 0.3, 8), normal()), sent(Quantile(256), normal())
    levels = exact.unique()
    edges = group_edges(int((levels < 0).sum()), 256, 8)
    assert (torch.searchsorted(levels, decoded) - torch.searchsorted(levels, exact)).abs().max() < max(np.diff(edges))


@together("groups", [2, 8, 16])
@together(("negative", "buckets"), [(0, 256), (256, 256), (1, 256), (130, 256), (5, 7), (0, 1), (1, 1)])
def test_groups_keep_to_one_sign(negative: int, buckets: int, groups: int) -> None:
    edges = group_edges(negative, buckets, groups)
    assert len(edges) == groups + 1
    assert edges == sorted(edges)
    assert edges[0] == 0
    assert edges[-1] == buckets
    assert negative in edges


def test_a_wide_sketch_loses_little() -> None:
    values = normal()[2:9003]
    narrow, wide = (sent(Quantile(256, 4, columns), normal()) for columns in (0.1, 1.0))
    assert (wide - values).norm() < 0.25 * (narrow - values).norm()


@pytest.mark.parametrize(
    "options", [{"buckets": 5}, {"rows": 9}, {"rows": -1}, {"columns": 0.0}, {"columns": math.nan}, {"groups": 3}]
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"{next(iter(options))}="):
        Quantile(**{"rows": 2, **options})


def test_values_are_known_by_name() -> None:
    assert parse("quantile:16") == CodedValues(Quantile(16))
    with pytest.raises(ConfigurationError, match="quantile:N"):
        parse("quantile")
