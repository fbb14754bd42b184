import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codec_checks import (
    cases,
    check_any_bytes,
    check_compiled_once,
    check_is_the_reference,
    check_residual_is_what_was_not_sent,
    decoded,
    encoded,
)
from gradwire.kernels import cpu
from gradwire.layout import Block
from gradwire.memory import NONE
from gradwire.quantize import TwoMeans
from test_kernels import BLOCKS, block_of, blocks, gradients, memories, normal

CODEC = TwoMeans()


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cpu.warm_up()


@blocks
@gradients
@memories
def test_is_the_reference(block: Block, gradient: Tensor, memory: tuple[float, float] | None) -> None:
    check_is_the_reference(CODEC, block, gradient, memory)


@blocks
@gradients
def test_residual_is_what_was_not_sent(block: Block, gradient: Tensor) -> None:
    check_residual_is_what_was_not_sent(CODEC, block, gradient)


@settings(max_examples=60, deadline=None)
@given(case=cases(), content=st.binary(min_size=1, max_size=60))
def test_any_values_and_any_bytes(case: tuple, content: bytes) -> None:
    check_is_the_reference(CODEC, *case)
    check_any_bytes(CODEC, case[0], content)


def test_means_of_either_side() -> None:
    block = block_of([5, 3])
    gradient = torch.zeros(12)
    gradient[2:7] = torch.tensor([1.0, -2.0, 0.0, -4.0, 5.0])
    gradient[10:12] = -1
    gradient = torch.cat((gradient, -torch.ones(12_000 - 12)))
    payload = encoded(CODEC, block, gradient, NONE)
    assert payload[:16].view(torch.float32).tolist() == [2.0, -3.0, 0.0, -1.0]
    assert payload.numel() == 16 + 4
    assert decoded(CODEC, block, payload[None])[2:7].tolist() == [2.0, -3.0, 2.0, -3.0, 2.0]


def test_contracts_by_what_it_sends() -> None:
    block, gradient = BLOCKS["large"], normal()
    sent = decoded(CODEC, block, encoded(CODEC, block, gradient, NONE)[None])
    for start, length, _ in block.runs:
        t, c = gradient[start : start + length].double(), sent[start : start + length].double()
        assert (t - c).square().sum() <= t.square().sum() - c.square().sum() + 1e-3


def test_compiled_once() -> None:
    check_compiled_once("two_means", "sign")
