from dataclasses import replace

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
    decoded,
    encoded,
)
from gradwire.errors import ConfigurationError
from gradwire.kernels import cpu
from gradwire.layout import Block
from gradwire.memory import NONE
from gradwire.quantize import Stochastic
from test_kernels import BLOCKS, KEY, block_of, blocks, covered, gradients, memories, normal

codecs = pytest.mark.parametrize(
    "codec",
    [
        Stochastic(4, rounding="nearest"),
        Stochastic(8, 64, rounding="nearest"),
        Stochastic(2, 0, "l2", rounding="nearest"),
    ],
    ids=["4", "8", "2"],
)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cpu.warm_up()


@codecs
@blocks
@gradients
@memories
def test_is_the_reference(
    codec: Stochastic, block: Block, gradient: Tensor, memory: tuple[float, float] | None
) -> None:
    check_is_the_reference(codec, block, gradient, memory)


@codecs
@settings(max_examples=40, deadline=None)
@given(case=cases(), content=st.binary(min_size=1, max_size=60))
def test_any_values_and_any_bytes(codec: Stochastic, case: tuple, content: bytes) -> None:
    check_is_the_reference(codec, *case)
    check_any_bytes(codec, case[0], content)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_value_is_off_by_half_a_level_at_most(bits: int) -> None:
    block, gradient = block_of([9000]), normal()
    codec = Stochastic(bits, 0, rounding="nearest")
    sent = decoded(codec, block, encoded(codec, block, gradient, NONE)[None])
    inside = covered(block)
    level = gradient[inside].abs().max() / (2 ** (bits - 1) - 1)
    assert ((sent - gradient)[inside].abs() <= level * 0.50001).all()


def test_needs_no_key_and_differs_from_stochastic_rounding() -> None:
    block, codec = BLOCKS["odd layers"], Stochastic(4, rounding="nearest")
    first, second = (encoded(codec, block, normal(), NONE, key) for key in (KEY, KEY + 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, encoded(replace(codec, rounding="stochastic"), block, normal(), NONE))


def test_rounding_must_be_known() -> None:
    with pytest.raises(ConfigurationError, match="rounding"):
        Stochastic(4, rounding="up")  # type: ignore[arg-type]


def test_compiled_once() -> None:
    check_compiled_once("stochastic", "_packed")
