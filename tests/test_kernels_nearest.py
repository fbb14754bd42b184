from dataclasses import replace

import pytest
import torch

from codec_checks import check_compiled_once, decoded, encoded
from gradwire.errors import ConfigurationError
from gradwire.memory import NONE
from gradwire.quantize import Stochastic
from kernel_inputs import BLOCKS, KEY, block_of, covered, normal

codecs = pytest.mark.parametrize(
    "codec",
    [
        Stochastic(4, rounding="nearest"),
        Stochastic(8, 64, rounding="nearest"),
        Stochastic(2, 0, "l2", rounding="nearest"),
    ],
    ids=["4", "8", "2"],
)


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
