"""Positions in Triton are written and read as the reference does it, and refused where it refuses them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import by_the_gpu  # noqa: F401

from gradwire.errors import PayloadError
from gradwire.kernels import gpu, reference
from guarded import copied, guarded, release
from kernel_inputs import same


@settings(max_examples=12, deadline=None)
@given(data=st.data(), universe=st.sampled_from([1, 8, 100, 4096, 1 << 20, 1 << 33]))
def test_read_and_written(data: st.DataObject, universe: int) -> None:
    chosen = data.draw(st.sets(st.integers(0, universe - 1), max_size=100))
    check_positions(torch.tensor(sorted(chosen), dtype=torch.int64), universe)


@pytest.mark.parametrize(("count", "universe"), [(2500, 100_000), (3000, 3000), (2, 2**45)])
def test_several_programs(count: int, universe: int) -> None:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randperm(universe, generator=generator)[:count] if universe < 2**31 else torch.tensor([5, 2**44])
    check_positions(drawn.sort().values, universe)


def check_positions(positions: torch.Tensor, universe: int) -> None:
    size = reference.elias_fano_bytes(len(positions), universe)
    payloads = [guarded(size, True, torch.uint8).fill_(0xFF), torch.empty(size, dtype=torch.uint8)]
    for payload, kernels in zip(payloads, (gpu, reference), strict=True):
        kernels.elias_fano_encode(copied(positions), universe, payload)
    assert same(*payloads)
    decoded = guarded(len(positions), False, torch.int64)
    gpu.elias_fano_decode(payloads[0], universe, decoded)
    assert torch.equal(decoded, positions)
    del payloads, payload, decoded
    release()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_bytes(data: st.DataObject) -> None:
    universe = data.draw(st.integers(1, 60))
    count = data.draw(st.integers(1, universe))
    size = reference.elias_fano_bytes(count, universe)
    payload, outcomes = torch.tensor(list(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8), []
    for kernels in (gpu, reference):
        memory = torch.full((count + 2,), -7)
        try:
            kernels.elias_fano_decode(payload, universe, memory[1:-1])
        except PayloadError:
            outcomes.append(None)
        else:
            outcomes.append(memory[1:-1].tolist())
        assert memory[0] == memory[-1] == -7
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("wrong", [[1, 5, 16], [5, 1, 9], [1, 1, 9], [-1, 5, 9]])
def test_what_is_not_ascending(wrong: list[int]) -> None:
    payload = torch.zeros(reference.elias_fano_bytes(3, 16), dtype=torch.uint8)
    with pytest.raises(PayloadError, match="ascending"):
        gpu.elias_fano_encode(torch.tensor(wrong), 16, payload)
    with pytest.raises(PayloadError, match="take 8 bytes"):
        gpu.elias_fano_encode(torch.tensor([1, 5, 9]), 16, torch.zeros(4, dtype=torch.uint8))
