import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec_checks import check_compiled_once, check_unbiased, decoded, encoded
from gradwire.codecs.quantize import Quantiser
from gradwire.errors import ConfigurationError
from gradwire.kernels import codes
from gradwire.kernels.code import trits_stride
from gradwire.kernels.reference.trits import pack_trits, unpack_trits
from gradwire.memory import NONE
from kernel_inputs import BLOCKS, BUFFER, block_of, covered, normal

codecs = pytest.mark.parametrize(
    "codec",
    [
        Quantiser(codes.TernGrad(0.0)),
        Quantiser(codes.TernGrad(2.5)),
        Quantiser(codes.ThreeLC(1.0)),
        Quantiser(codes.ThreeLC(1.75)),
    ],
    ids=str,
)


@given(digits=st.lists(st.integers(0, 2), max_size=300))
def test_trits_come_back(digits: list[int]) -> None:
    values = torch.tensor(digits + [0] * (-len(digits) % 8), dtype=torch.uint8)
    packed = pack_trits(values)
    assert packed.numel() == trits_stride(values.numel())
    assert packed.numel() <= values.numel() / 5 + 8
    assert torch.equal(unpack_trits(packed, values.numel()), values.int())


def test_ternary_is_unbiased() -> None:
    check_unbiased(Quantiser(codes.TernGrad(0.0)))


def test_ternary_error_is_the_published_one() -> None:
    """The mean squared error of 300 draws is within 10 % of ``scale |t|_1 - |t|^2``."""
    block, gradient = block_of([9000]), normal()
    t = gradient[covered(block)].double()
    errors = []
    for key in range(300):
        sent = decoded(
            Quantiser(codes.TernGrad(0.0)),
            block,
            encoded(Quantiser(codes.TernGrad(0.0)), block, gradient, NONE, key)[None],
        )
        errors.append(float((sent[covered(block)].double() - t).square().sum()))
    expected = float(t.abs().max() * t.abs().sum() - t.square().sum())
    assert abs(sum(errors) / len(errors) / expected - 1) <= 0.1


def test_clipping_is_at_standard_deviations() -> None:
    block, gradient = block_of([9000]), 3 + normal()
    t = gradient[covered(block)]
    payload = encoded(Quantiser(codes.TernGrad(1.5)), block, gradient, NONE)
    assert payload[:4].view(torch.float32).item() == pytest.approx(1.5 * float(t.double().std(correction=0)), rel=1e-6)
    equal = encoded(Quantiser(codes.TernGrad(2.5)), block, torch.full((BUFFER,), 0.1), NONE)
    assert equal[:4].view(torch.float32).item() == pytest.approx(0.1)


def test_three_level_sends_the_nearest() -> None:
    block, gradient = BLOCKS["one element"], normal()
    gradient[2] = -3.0
    assert (
        decoded(Quantiser(codes.ThreeLC()), block, encoded(Quantiser(codes.ThreeLC()), block, gradient, NONE)[None])[2]
        == -3.0
    )
    block = block_of([9000])
    gradient[5] = 4.0
    sent = decoded(
        Quantiser(codes.ThreeLC(1.5)), block, encoded(Quantiser(codes.ThreeLC(1.5)), block, gradient, NONE)[None]
    )[covered(block)]
    scale = 1.5 * gradient[covered(block)].abs().max()
    assert torch.equal(sent, scale * (gradient[covered(block)] / scale).round())


def test_sizes() -> None:
    for numel in (1, 40, 1000, 1_000_000):
        block = block_of([numel])
        assert Quantiser(codes.TernGrad()).payload_bytes(block) <= 4 + block.positions / 5 + 8
    assert Quantiser(codes.TernGrad()).payload_bytes(block_of([1_000_000])) == 4 + 200_000


@pytest.mark.parametrize("clip", [-1.0, math.inf, math.nan])
def test_clip_out_of_range(clip: float) -> None:
    with pytest.raises(ConfigurationError, match="clip"):
        Quantiser(codes.TernGrad(clip))


@pytest.mark.parametrize("sparsity", [0.9, 2.0, math.nan])
def test_sparsity_out_of_range(sparsity: float) -> None:
    with pytest.raises(ConfigurationError, match="sparsity"):
        Quantiser(codes.ThreeLC(sparsity))


def test_compiled_once() -> None:
    check_compiled_once("terngrad", "threelc", "trits", "quantise")
