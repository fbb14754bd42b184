import pytest
import torch

from codec_checks import check_compiled_once, decoded, encoded
from gradwire.codecs.quantize import Quantiser
from gradwire.kernels import codes
from gradwire.kernels.reference.dynamic import magnitudes, thresholds
from gradwire.memory import NONE
from kernel_inputs import BUFFER, block_of, covered, normal

CODEC = Quantiser(codes.Dynamic())


def test_the_table_is_the_published_one() -> None:
    """Leading zeros, a flag, a bisection of (0.1, 1)."""
    table = magnitudes().double()
    assert table[0] == 0
    for code in range(1, 128):
        low, high = 0.1, 1.0
        bits = f"{code:07b}".lstrip("0")
        for bit in bits[1:]:
            middle = (low + high) / 2
            low, high = (middle, high) if bit == "1" else (low, middle)
        assert table[code] == pytest.approx((low + high) / 2 * 10.0 ** -(7 - len(bits)), rel=1e-6)
    assert (table.diff() > 0).all()


def test_every_entry_is_sent_as_itself() -> None:
    """The entries, as they are in a segment whose largest magnitude is 1, with both signs."""
    block, gradient = block_of([257]), torch.zeros(BUFFER)
    values = torch.cat((magnitudes(), -magnitudes(), torch.ones(1)))
    gradient[2:259] = values
    sent = decoded(CODEC, block, encoded(CODEC, block, gradient, NONE)[None])[2:259]
    assert torch.equal(sent[:256], values[:256])
    assert sent[256] == magnitudes()[-1]


def test_near_every_threshold_the_nearest_entry_is_sent() -> None:
    """The three floats around each threshold; a tie goes to the lower entry."""
    edges = thresholds()
    near = torch.stack((edges.nextafter(edges * 0), edges, edges.nextafter(edges * 2))).flatten()
    block, gradient = block_of([len(near) + 1]), torch.zeros(BUFFER)
    gradient[2 : 2 + len(near)] = near
    gradient[2 + len(near)] = 1
    sent = decoded(CODEC, block, encoded(CODEC, block, gradient, NONE)[None])[2 : 2 + len(near)].view(3, -1)
    table = magnitudes()
    assert torch.equal(sent[0], table[:-1])
    assert torch.equal(sent[1], table[:-1])
    assert torch.equal(sent[2], table[1:])


def test_relative_errors() -> None:
    block = block_of([9000])
    gradient = 10 ** (-5 * torch.rand(BUFFER, generator=torch.Generator().manual_seed(1))) * normal().sign()
    gradient[2] = 1
    sent = decoded(CODEC, block, encoded(CODEC, block, gradient, NONE)[None])
    inside = covered(block) & (gradient.abs() >= 1e-5)
    assert ((sent - gradient).abs() <= 0.5 * gradient.abs())[inside].all()
    large = inside & (gradient.abs() >= 0.1)
    assert ((sent - gradient).abs() <= 0.9 / 128 + 1e-6)[large].all()


def test_compiled_once() -> None:
    check_compiled_once("dynamic")
