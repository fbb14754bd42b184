import pytest

from codec_checks import check_compiled_once, check_sends_one_of_two_powers, check_unbiased
from gradwire.codecs.quantize import Quantiser
from gradwire.kernels.codes import NUQSGD


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_is_unbiased(bits: int) -> None:
    check_unbiased(Quantiser(NUQSGD(bits), 64))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_sends_one_of_the_two_levels_around(bits: int) -> None:
    check_sends_one_of_two_powers(Quantiser(NUQSGD(bits)), bits)


def test_compiled_once() -> None:
    check_compiled_once("nuqsgd", "quantise", "_packed")
