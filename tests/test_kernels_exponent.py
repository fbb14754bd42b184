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
from gradwire.quantize import Exponent
from test_kernels import BUFFER, block_of, blocks, covered, gradients, memories, normal

CODEC = Exponent()


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


def test_sends_the_nearest_power() -> None:
    pairs = {
        7.9: 4.0,
        -4.0: -4.0,
        3.1: 4.0,
        2.9: 2.0,
        3.0: 4.0,
        -1.4: -1.0,
        0.0625: 0.0625,
        0.05: 0.0625,
        0.047: 0.0625,
        0.046: 0.0,
        -0.001: 0.0,
        0.0: 0.0,
    }
    block, gradient = block_of([len(pairs)]), torch.zeros(BUFFER)
    gradient[2 : 2 + len(pairs)] = torch.tensor(list(pairs))
    sent = decoded(CODEC, block, encoded(CODEC, block, gradient, NONE)[None])
    assert sent[2 : 2 + len(pairs)].tolist() == list(pairs.values())


def test_relative_errors() -> None:
    block, gradient = block_of([9000]), normal()
    sent = decoded(CODEC, block, encoded(CODEC, block, gradient, NONE)[None])
    top = 2 ** gradient[covered(block)].abs().max().log2().floor()
    inside = covered(block) & (gradient.abs() <= top * 1.5) & (gradient.abs() >= top * 2**-6)
    assert ((sent - gradient).abs() <= gradient.abs() * 0.33334)[inside].all()


def test_compiled_once() -> None:
    check_compiled_once("exponent", "_packed")
