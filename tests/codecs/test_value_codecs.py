"""Laws of all codecs that send every value."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codec_checks import cases, check_any_bytes, check_is_the_reference, check_residual_is_what_was_not_sent
from gradwire.codecs.codec import Codec
from gradwire.codecs.quantize import Quantiser
from gradwire.codecs.quantize.smoothed import Smoothed
from gradwire.codecs.transform import RotatedCentroids
from gradwire.errors import ConfigurationError
from gradwire.kernels import codes
from gradwire.layout import Block
from gradwire.memory import NONE
from kernel_inputs import BLOCKS, GRADIENTS, block_of, gradients
from together import together

CODECS: list[Codec] = [
    *(
        Quantiser(code)
        for code in [
            codes.Sign(),
            codes.Sign(2),
            codes.Vote(),
            codes.Ballot(),
            codes.Ballot(4),
            codes.Ballot(8),
            codes.Ballot(signs=True),
            codes.OneBit(),
            codes.Dynamic(),
            codes.Exponent(),
            codes.TernGrad(0.0),
            codes.TernGrad(2.5),
            codes.ThreeLC(1.0),
            codes.ThreeLC(1.75),
            codes.NUQSGD(2),
            codes.NUQSGD(4),
            codes.NUQSGD(8),
            codes.NonUniform.powers(2),
            codes.NonUniform.powers(4),
            codes.NonUniform.powers(8),
            codes.Natural(9),
            codes.Natural(8),
            codes.QSGD(4),
            codes.QSGD(8, euclidean=True),
            codes.QSGD(2, euclidean=True, nearest=True),
        ]
    ),
    Quantiser(codes.QSGD(2), 512),
    Quantiser(codes.QSGD(4, euclidean=True), 64),
    Quantiser(codes.QSGD(8), 104),
    Quantiser(codes.QSGD(4), 5000),
    Quantiser(codes.QSGD(4, nearest=True), 512),
    Quantiser(codes.QSGD(8, nearest=True), 64),
    Smoothed(codes.QSGD(4)),
    Smoothed(codes.QSGD(8, nearest=True)),
    RotatedCentroids(1),
    RotatedCentroids(2, 256),
    RotatedCentroids(4, 512),
]
MEMORIES = (None, (0.9, 0.3))
"""In turn, so that every block and every gradient comes with both."""

CUTS = ("odd layers", "one bucket", "small blocks", "packed shard")

codecs = pytest.mark.parametrize("codec", CODECS, ids=str)
with_a_scale_a_segment = pytest.mark.parametrize(
    "codec", [codec for codec in CODECS if isinstance(codec, Quantiser) and not codec.size], ids=str
)


@codecs
@together(
    ("block", "gradient", "memory"),
    [
        (block, gradient, MEMORIES[(row + column) % 2])
        for row, block in enumerate(BLOCKS.values())
        for column, gradient in enumerate(GRADIENTS.values())
    ],
    [f"{block}-{gradient}" for block in BLOCKS for gradient in GRADIENTS],
)
def test_is_the_reference(codec: Quantiser, block: Block, gradient: Tensor, memory: tuple[float, float] | None) -> None:
    check_is_the_reference(codec, block, gradient, memory)


@with_a_scale_a_segment
@together("block", [BLOCKS[name] for name in CUTS], CUTS)
@gradients
def test_residual_is_what_was_not_sent(codec: Quantiser, block: Block, gradient: Tensor) -> None:
    check_residual_is_what_was_not_sent(codec, block, gradient)


@codecs
@settings(max_examples=20, deadline=None)
@given(case=cases(), content=st.binary(min_size=1, max_size=60))
def test_any_values_and_any_bytes(codec: Quantiser, case: tuple, content: bytes) -> None:
    check_is_the_reference(codec, *case)
    check_any_bytes(codec, case[0], content)


@pytest.mark.parametrize(("norm", "kept"), [(1, 4.0), (2, 5.0)])
def test_signs_have_the_mean_magnitude_or_the_length(norm: int, kept: float) -> None:
    values = torch.tensor([0.0, 0.0, 1.0, -7.0])
    block, payload = block_of([2]), torch.empty(1, 8, dtype=torch.uint8)
    Quantiser(codes.Sign(norm)).encode(block, values, NONE, payload[0], 0)
    out = torch.zeros(4)
    Quantiser(codes.Sign(norm)).decode(block, payload, out, 1.0)
    assert out[2:].tolist() == [kept, -kept]


def test_other_norms_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="norm=3 is not possible"):
        Quantiser(codes.Sign(3))


def test_sign_sizes() -> None:
    assert Quantiser(codes.Sign()).payload_bytes(block_of([5, 64, 17])) == 3 * 4 + 96 // 8
    assert Quantiser(codes.Sign()).payload_bytes(block_of([9])) == 4 + 4
