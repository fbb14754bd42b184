import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_checks import check_compiled_once
from gradwire.errors import PayloadError
from gradwire.kernels import cpu, reference
from kernel_inputs import same


@settings(max_examples=80, deadline=None)
@given(data=st.data(), universe=st.sampled_from([1, 8, 100, 4096, 1 << 20, 1 << 33, 1 << 45]))
def test_elias_fano_roundtrip(data: st.DataObject, universe: int) -> None:
    chosen = data.draw(st.sets(st.integers(0, universe - 1), max_size=200))
    positions = torch.tensor(sorted(chosen), dtype=torch.int64)
    if universe > 1 << 33 and len(chosen) < 200:
        return
    payloads = torch.full((2, reference.elias_fano_bytes(len(chosen), universe)), 0xFF, dtype=torch.uint8)
    for payload, kernels in zip(payloads, (cpu, reference), strict=True):
        kernels.elias_fano_encode(positions, universe, payload)
    assert same(*payloads)
    for kernels in (cpu, reference):
        decoded = torch.full_like(positions, -1)
        kernels.elias_fano_decode(payloads[0], universe, decoded)
        assert torch.equal(decoded, positions)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_malformed_elias_fano_bytes(data: st.DataObject) -> None:
    """Any bytes either decode, to valid positions, or are rejected, by both and without a write outside."""
    universe = data.draw(st.integers(1, 300))
    count = data.draw(st.integers(1, universe))
    size = reference.elias_fano_bytes(count, universe)
    payload = torch.tensor(list(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    if data.draw(st.booleans()):
        payload[: size // 2] = 0xFF
    outcomes = []
    for kernels in (cpu, reference):
        memory = torch.full((count + 2,), -7)
        try:
            kernels.elias_fano_decode(payload, universe, memory[1:-1])
        except PayloadError:
            outcomes.append(None)
        else:
            outcomes.append(memory[1:-1].tolist())
            assert memory[1] >= 0
            assert memory[-2] < universe
            assert (memory[1:-1].diff() > 0).all()
        assert memory[0] == memory[-1] == -7
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_elias_fano_rejects(kernels: object) -> None:
    positions = torch.tensor([1, 5, 9])
    payload = torch.zeros(reference.elias_fano_bytes(3, 16), dtype=torch.uint8)
    for wrong in ([1, 5, 16], [5, 1, 9], [1, 1, 9], [-1, 5, 9]):
        with pytest.raises(PayloadError):
            kernels.elias_fano_encode(torch.tensor(wrong), 16, payload)
    with pytest.raises(PayloadError):
        kernels.elias_fano_encode(positions, 16, torch.zeros(4, dtype=torch.uint8))
    for byte in (0x00, 0xFF):
        with pytest.raises(PayloadError):
            kernels.elias_fano_decode(torch.full_like(payload, byte), 16, positions)
    with pytest.raises(PayloadError):
        kernels.elias_fano_decode(payload[:4], 16, positions)


def test_sizes() -> None:
    assert reference.elias_fano_bytes(0, 1000) == 0
    assert reference.elias_fano_bytes(10, 1000) == 8 + 4  # 10 * 6 low bits; 10 + (999 >> 6) high ones
    for count, universe in ((1, 1), (3, 3), (250, 25_000), (7, 2**40), (1000, 1023)):
        size = reference.elias_fano_bytes(count, universe)
        assert size % 4 == 0
        if universe < 2**32:
            assert 8 * size <= count * (2 + math.log2(universe / count)) + 64


def test_compiled_once() -> None:
    check_compiled_once("elias_fano")
