import pytest
import torch

from codec_checks import check_compiled_once, check_unbiased, decoded, decoded_once, encoded
from gradwire.codecs.quantize import Quantiser
from gradwire.errors import ConfigurationError
from gradwire.kernels import codes
from gradwire.memory import NONE
from kernel_inputs import BUFFER, block_of, covered, normal

codecs = pytest.mark.parametrize("codec", [Quantiser(codes.Natural(9)), Quantiser(codes.Natural(8))], ids=str)


@codecs
def test_is_unbiased(codec: Quantiser) -> None:
    check_unbiased(codec)


@codecs
@pytest.mark.parametrize("scale", [1.0, 2.0**100, 2.0**-120])
def test_sends_one_of_the_two_powers_around(codec: Quantiser, scale: float) -> None:
    block = block_of([9000])
    gradient = normal() * scale
    sent = decoded(codec, block, encoded(codec, block, gradient, NONE)[None])[covered(block)].double()
    t = gradient[covered(block)].double()
    lower = torch.ldexp(torch.ones_like(t), t.abs().frexp().exponent - 1)
    assert ((sent.abs() == lower) | (sent.abs() == 2 * lower) | (t.abs() < 2.0**-126)).all()
    assert (sent.sign() == t.sign()).sum() == (sent != 0).sum()
    powers = torch.where(normal() < 0, -scale, scale)
    exact = decoded(codec, block, encoded(codec, block, powers, NONE)[None])
    assert torch.equal(exact[covered(block)], powers[covered(block)])


@codecs
@pytest.mark.parametrize(("value", "largest"), [(1e-39, 1e-39), (0.3, 2.0**127), (1.5 * 2.0**-130, 2.0)])
def test_values_below_the_smallest_power_are_unbiased(codec: Quantiser, value: float, largest: float) -> None:
    """The mean of 9,000 draws lies within 5 standard errors, of at most one smallest power each."""
    block = block_of([9001])
    gradient = torch.full((BUFFER,), value)
    gradient[2] = largest
    sent = decoded_once(codec, block, encoded(codec, block, gradient, NONE))[3:9003].double()
    smallest = max(2.0**-126, 2.0**-124 * largest if codec.code.bits == 8 else 0.0, value)
    assert abs(sent.mean() - gradient[3].double()) <= 5 * smallest / 9000**0.5
    assert sent.mean() > 0


def test_the_largest_values_stay_finite() -> None:
    block = block_of([3])
    gradient = torch.full((BUFFER,), 3.4028234e38)
    for bits in (8, 9):
        sent = decoded(
            Quantiser(codes.Natural(bits)), block, encoded(Quantiser(codes.Natural(bits)), block, gradient, NONE)[None]
        )
        assert sent[2:5].tolist() == [2.0**127] * 3


def test_sizes() -> None:
    block = block_of([5, 64, 17])
    assert Quantiser(codes.Natural(9)).payload_bytes(block) == 96 + 12
    assert Quantiser(codes.Natural(8)).payload_bytes(block) == 3 * 4 + 96


@pytest.mark.parametrize("bits", [7, 10, 32])
def test_bits_out_of_range(bits: int) -> None:
    with pytest.raises(ConfigurationError, match="bits"):
        Quantiser(codes.Natural(bits))


def test_compiled_once() -> None:
    check_compiled_once("natural", "quantise")
