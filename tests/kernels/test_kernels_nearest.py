import pytest
import torch

from codec_checks import check_compiled_once, decoded, encoded
from gradwire.codecs.quantize import Quantiser
from gradwire.kernels.codes import QSGD
from gradwire.memory import NONE
from kernel_inputs import BLOCKS, KEY, block_of, covered, normal


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_value_is_off_by_half_a_level_at_most(bits: int) -> None:
    block, gradient = block_of([9000]), normal()
    codec = Quantiser(QSGD(bits, nearest=True))
    sent = decoded(codec, block, encoded(codec, block, gradient, NONE)[None])
    inside = covered(block)
    level = gradient[inside].abs().max() / (2 ** (bits - 1) - 1)
    assert ((sent - gradient)[inside].abs() <= level * 0.50001).all()


def test_needs_no_key_and_differs_from_stochastic_rounding() -> None:
    block, codec = BLOCKS["odd layers"], Quantiser(QSGD(4, nearest=True))
    first, second = (encoded(codec, block, normal(), NONE, key) for key in (KEY, KEY + 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, encoded(Quantiser(QSGD(4)), block, normal(), NONE))


def test_compiled_once() -> None:
    check_compiled_once("qsgd", "_packed", "quantise")
