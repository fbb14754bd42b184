"""Laws of all codecs that send every value."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codec_checks import cases, check_any_bytes, check_is_the_reference, check_residual_is_what_was_not_sent
from gradwire.kernels import codes
from gradwire.layout import Block
from gradwire.quantize import Quantiser
from kernel_inputs import BLOCKS, GRADIENTS, block_of, gradients

CODECS = [
    *(
        Quantiser(code)
        for code in [
            codes.Sign(),
            codes.Vote(),
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
]
MEMORIES = (None, (0.9, 0.3))
"""In turn, so that every block and every gradient comes with both."""

CUTS = ("odd layers", "one bucket", "small blocks", "packed shard")

codecs = pytest.mark.parametrize("codec", CODECS, ids=str)
with_a_scale_a_segment = pytest.mark.parametrize("codec", [codec for codec in CODECS if not codec.size], ids=str)


@codecs
@pytest.mark.parametrize(
    ("block", "gradient", "memory"),
    [
        pytest.param(block, gradient, MEMORIES[(row + column) % 2], id=f"{name}-{kind}")
        for row, (name, block) in enumerate(BLOCKS.items())
        for column, (kind, gradient) in enumerate(GRADIENTS.items())
    ],
)
def test_is_the_reference(codec: Quantiser, block: Block, gradient: Tensor, memory: tuple[float, float] | None) -> None:
    check_is_the_reference(codec, block, gradient, memory)


@with_a_scale_a_segment
@pytest.mark.parametrize("block", [BLOCKS[name] for name in CUTS], ids=CUTS)
@gradients
def test_residual_is_what_was_not_sent(codec: Quantiser, block: Block, gradient: Tensor) -> None:
    check_residual_is_what_was_not_sent(codec, block, gradient)


@codecs
@settings(max_examples=40, deadline=None)
@given(case=cases(), content=st.binary(min_size=1, max_size=60))
def test_any_values_and_any_bytes(codec: Quantiser, case: tuple, content: bytes) -> None:
    check_is_the_reference(codec, *case)
    check_any_bytes(codec, case[0], content)


def test_sign_sizes() -> None:
    assert Quantiser(codes.Sign()).payload_bytes(block_of([5, 64, 17])) == 3 * 4 + 96 // 8
    assert Quantiser(codes.Sign()).payload_bytes(block_of([9])) == 4 + 4
