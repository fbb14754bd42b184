"""What holds for every codec, whatever it writes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numba
import torch
from hypothesis import strategies as st
from numba import types
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.kernels import codes, dispatch
from gradwire.layout import Block
from gradwire.memory import NONE, Feedback
from gradwire.randomness import key_of
from kernel_inputs import BUFFER, KEY, block_of, covered, floats, no_kernels, normal, residuals, same, strided


@contextmanager
def by_the_reference():
    with mock.patch.object(dispatch, "overrides", no_kernels):
        yield


def encoded(codec: Codec, block: Block, gradient: Tensor, feedback: Feedback, key: int = KEY) -> Tensor:
    payload = torch.full((codec.payload_bytes(block),), 0x5A, dtype=torch.uint8)
    codec.encode(block, gradient, feedback, payload, key)
    return payload


def decoded(codec: Codec, block: Block, payloads: Tensor, weight: float = 1.0) -> Tensor:
    """Decodes by both, compares, and checks that nothing outside the block was written."""
    out, other = normal(1), normal(1)
    codec.decode(block, payloads, out, weight)
    with by_the_reference():
        codec.decode(block, payloads, other, weight)
    assert same(out, other)
    outside = ~covered(block)
    assert same(out[outside], normal(1)[outside])
    return out


def check_is_the_reference(
    codec: Codec, block: Block, gradient: Tensor, memory: tuple[float, float] | None, key: int = KEY
) -> None:
    size = codec.payload_bytes(block)
    assert size % 4 == 0
    left, right, beta, gamma = residuals(memory)
    for residual in (left, right):
        if residual is not None:
            residual[::5] = -0.0
    before = None if left is None else left.clone()
    payloads = strided(size, 3)
    codec.encode(block, gradient, Feedback(left, beta, gamma), payloads[1], key)
    with by_the_reference():
        expected = encoded(codec, block, gradient, Feedback(right, beta, gamma), key)
    assert same(payloads[1], expected)
    if before is not None:
        assert same(left, right)
        outside = ~covered(block)
        assert same(left[outside], before[outside])
    for row, seed in ((0, 5), (2, 6)):
        codec.encode(block, normal(seed), Feedback(None), payloads[row], key)
    decoded(codec, block, payloads, 1 / 3)
    decoded(codec, block, payloads[1:2], 1 / 3)


def check_residual_is_what_was_not_sent(codec: Codec, block: Block, gradient: Tensor) -> None:
    residual = normal(99)
    t, old = 0.9 * residual + 0.3 * gradient, residual.clone()
    payload = encoded(codec, block, gradient, Feedback(residual, 0.9, 0.3))
    sent = decoded(codec, block, payload[None])
    mask = covered(block)
    marked = sent.isnan()
    expected = torch.where(marked, torch.where(t.isfinite(), t, old), t - sent)
    assert torch.equal(residual[mask], expected[mask])
    assert residual.isfinite().all()
    for segment in range(block.segment_count):
        parts = [
            slice(start, start + length)
            for start, length, _ in block.runs[block.segments[segment] : block.segments[segment + 1]]
        ]
        finite = all(bool(t[part].isfinite().all()) for part in parts)
        for part in parts:
            assert sent[part].isfinite().all() if finite else marked[part].all()


@st.composite
def cases(draw: st.DrawFn) -> tuple[Block, Tensor, tuple[float, float] | None, int]:
    values = draw(st.lists(st.tuples(floats, floats), min_size=1, max_size=90))
    cuts = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    block = block_of(cuts, draw(st.sampled_from(["layer", "bucket", "block:7"])), hole=1)
    gradient = torch.tensor(values).flatten().repeat(BUFFER // (2 * len(values)) + 1)[:BUFFER].contiguous()
    return block, gradient, draw(st.sampled_from([None, (1.0, 1.0), (0.9, 0.1)])), draw(st.integers(0, 2**64 - 1))


def check_any_bytes(codec: Codec, block: Block, content: Sequence[int]) -> None:
    """Bytes that no encoder wrote decode alike by both, and within the block."""
    size = codec.payload_bytes(block)
    payload = torch.tensor(list(content), dtype=torch.uint8).repeat(size // max(len(content), 1) + 1)[:size]
    decoded(codec, block, payload.contiguous()[None])
    decoded(codec, block, torch.stack((payload, payload.flip(0))), 0.5)


def check_unbiased(codec: Codec, draws: int = 400) -> None:
    """Against the standard error of the mean of some draws, pooled over 4,001 elements.

    The error along the vector itself is within 5 standard errors. The squared error of the mean is within 25 % of the
    variance of the mean: a bias would add the number of draws times its square.
    """
    block = block_of([4001])
    gradient, inside = normal(5), covered(block)
    t = gradient[inside].double()
    rows = torch.stack(
        [
            decoded_once(codec, block, encoded(codec, block, gradient, Feedback(None), key_of(0, draw, 0)))[inside]
            for draw in range(draws)
        ]
    ).double()
    error = rows.mean(0) - t
    variance = rows.var(0)
    assert (error * t).sum().abs() <= 5 * ((variance * t.square()).sum() / draws).sqrt()
    assert abs(error.square().sum() / (variance.sum() / draws) - 1) <= 0.25


def check_sends_one_of_two_powers(codec: Codec, bits: int) -> None:
    """Levels are 0, 2**-s, ..., 1/2, 1 times the norm, with s = 2**(bits - 1) - 2; sent is one around the value."""
    block, gradient = block_of([4000]), normal()
    sent = decoded(codec, block, encoded(codec, block, gradient, NONE)[None])[covered(block)].double()
    t = gradient[covered(block)]
    norm = t.double().square().sum().sqrt().float().double()
    levels = torch.tensor([0.0, *(2.0**-power for power in reversed(range(2 ** (bits - 1) - 1)))]) * norm
    above = torch.searchsorted(levels, t.abs().double())
    off = torch.minimum((sent.abs() - levels[above]).abs(), (sent.abs() - levels[above - 1]).abs())
    assert (off <= 1e-6 * norm).all()
    assert ((sent == 0) | (sent.sign() == t.sign())).all()


def decoded_once(codec: Codec, block: Block, payload: Tensor) -> Tensor:
    out = torch.zeros(BUFFER)
    codec.decode(block, payload[None], out, 1.0)
    return out


def check_compiled_once(*modules: str) -> None:
    """Nothing that was called so far was compiled for arguments of more than one kind, once for each code.

    A kernel that calls another with a constant has that one compiled for the constant, whose type is counted as that of
    any other value. Whether it shows depends on who compiled the caller: one that is loaded from the disk brings along
    what it calls.
    """
    functions: dict[str, Any] = {
        f"{name}.{key}": function
        for name in modules
        for module in [sys.modules[f"gradwire.kernels.cpu.{name}"]]
        for key, function in vars(module).items()
        if isinstance(function, numba.core.dispatcher.Dispatcher) and function.__module__ == module.__name__
    }
    assert functions
    kinds = {name: set(map(_kind, f.signatures)) for name, f in functions.items()}
    assert {name: found for name, found in kinds.items() if len(found) > 1} == {}


def _kind(signature: tuple[types.Type, ...]) -> tuple[types.Type, ...]:
    """The types of some arguments, but for a code, whatever kind of constants they are."""
    return tuple(types.unliteral(each) for each in signature if _class(each) not in codes.ALL)


def _class(kind: types.Type) -> type:
    return kind.instance_class if isinstance(kind, types.BaseNamedTuple) else object
