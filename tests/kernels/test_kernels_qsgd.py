import math

import pytest
import torch

from codec_checks import check_compiled_once
from gradwire.kernels import Compensated, cpu, payload_bytes, reference
from gradwire.kernels.codes import QSGD
from gradwire.layout import Block, Granularity, Slot
from gradwire.randomness import key_of
from kernel_inputs import BLOCKS, BUFFER, KEY, block_of, same


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_stochastic_rounding_is_unbiased(bits: int) -> None:
    """The mean of ``n`` draws lies within 5 standard errors, of at most half a level each, of the true value."""
    numel, draws = 512, 1000
    block = Block.cut([Slot("weight", (numel,), 0)], Granularity("layer"))
    gradient = torch.linspace(-1, 1, numel)
    payload = torch.zeros(draws, payload_bytes(QSGD(bits), block), dtype=torch.uint8)
    for draw in range(draws):
        cpu.encode(QSGD(bits), block, Compensated(gradient), payload[draw], key_of(0, draw, 0))
    mean = torch.zeros(numel)
    cpu.decode(QSGD(bits), block, payload, mean, 1 / draws)
    level = 1 / (2 ** (bits - 1) - 1)
    error = mean - gradient
    assert error.abs().max() <= 5 * (level / 2) / math.sqrt(draws)
    assert error.mean().abs() <= 5 * (level / 2) / math.sqrt(draws * numel)
    assert mean[gradient == 0].eq(0).all()


@pytest.mark.parametrize("granularity", ["layer", "bucket", "block:16"])
def test_rounding_does_not_depend_on_segments(granularity: str) -> None:
    """With one scale for all, the codes of an element are the same however it is cut."""
    lengths = (64, 160)
    gradient = torch.sin(torch.arange(BUFFER)) * 0.9
    whole, cut = block_of(lengths), block_of(lengths, granularity)
    gradient[whole.runs[:, 0]] = 1.0
    gradient[cut.runs[:, 0]] = 1.0
    outs = []
    for block in (whole, cut):
        payload = torch.zeros(1, payload_bytes(QSGD(4), block), dtype=torch.uint8)
        outs.append(torch.zeros(BUFFER))
        cpu.encode(QSGD(4), block, Compensated(gradient), payload[0], KEY)
        cpu.decode(QSGD(4), block, payload, outs[-1], 1.0)
    assert torch.equal(*outs)


def test_any_codes_decode_to_finite_values() -> None:
    block = BLOCKS["odd layers"]
    scales = torch.tensor([3.4028235e38, -3.4028235e38, 1.0, 1e-45, 3.4028235e38])
    for bits in (2, 4, 8):
        payload = torch.full((1, payload_bytes(QSGD(bits), block)), 0xFF, dtype=torch.uint8)
        for byte in (0x00, 0xFF):
            payload.fill_(byte)
            payload[0, :20] = scales.view(torch.uint8)
            out, other = torch.zeros(BUFFER), torch.zeros(BUFFER)
            cpu.decode(QSGD(bits), block, payload, out, 1.0)
            reference.decode(QSGD(bits), block, payload, other, 1.0)
            assert out.isfinite().all()
            assert same(out, other)


def test_sizes() -> None:
    block = block_of([5, 64, 17])
    assert block.positions == 96
    assert payload_bytes(QSGD(4), block) == 3 * 4 + 48
    assert payload_bytes(QSGD(8), block.divided(16)) == (1 + 4 + 2) * 4 + 96
    assert payload_bytes(QSGD(2), block.divided(512)) == 3 * 4 + 24


def test_compiled_once() -> None:
    check_compiled_once("qsgd", "_packed", "quantise")
