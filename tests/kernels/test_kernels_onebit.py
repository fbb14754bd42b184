import torch

from codec_checks import check_compiled_once, decoded, encoded
from gradwire.codecs.quantize import Quantiser
from gradwire.kernels import codes
from gradwire.memory import NONE
from kernel_inputs import BLOCKS, block_of, normal

CODEC = Quantiser(codes.OneBit())


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
    check_compiled_once("onebit", "quantise", "_packed")
