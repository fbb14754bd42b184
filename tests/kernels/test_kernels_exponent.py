import torch

from codec_checks import check_compiled_once, decoded, encoded
from gradwire.codecs.quantize import Quantiser
from gradwire.kernels import codes
from gradwire.memory import NONE
from kernel_inputs import BUFFER, block_of, covered, normal

CODEC = Quantiser(codes.Exponent())


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
