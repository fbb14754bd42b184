import pytest
import torch

from codec_checks import check_compiled_once, check_unbiased, decoded, encoded
from gradwire.codecs.quantize import Quantiser
from gradwire.kernels.codes import NonUniform
from gradwire.memory import NONE
from kernel_inputs import block_of, covered, normal


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_is_unbiased(bits: int) -> None:
    check_unbiased(Quantiser(NonUniform.powers(bits), 64))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_sends_one_of_the_two_levels_around(bits: int) -> None:
    """Levels are 0, 2**-s, ..., 1/2, 1 times the norm, with s = 2**(bits - 1) - 2."""
    block, gradient, codec = block_of([4000]), normal(), Quantiser(NonUniform.powers(bits))
    sent = decoded(codec, block, encoded(codec, block, gradient, NONE)[None])[covered(block)].double()
    t = gradient[covered(block)]
    norm = t.double().square().sum().sqrt().float().double()
    levels = torch.tensor([0.0, *(2.0**-power for power in reversed(range(2 ** (bits - 1) - 1)))]) * norm
    above = torch.searchsorted(levels, t.abs().double())
    off = torch.minimum((sent.abs() - levels[above]).abs(), (sent.abs() - levels[above - 1]).abs())
    assert (off <= 1e-6 * norm).all()
    assert ((sent == 0) | (sent.sign() == t.sign())).all()


def test_compiled_once() -> None:
    check_compiled_once("nonuniform", "quantise", "_packed")
