"""Bitmaps: Numba against the reference, and bytes that no encoder writes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.codecs.index import Bitmap
from gradwire.errors import PayloadError
from gradwire.kernels import cpu, reference

KERNELS = (cpu, reference)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 300))
def test_both_kernels_write_the_same_bits_and_read_them(data: st.DataObject, universe: int) -> None:
    chosen = sorted(data.draw(st.sets(st.integers(0, universe - 1))))
    positions = torch.tensor(chosen, dtype=torch.int64)
    payloads = torch.full((2, Bitmap().size(len(chosen), universe)), 0xFF, dtype=torch.uint8)
    for kernels, payload in zip(KERNELS, payloads, strict=True):
        kernels.bitmap_encode(positions, universe, payload)
    assert torch.equal(payloads[0], payloads[1])
    for kernels in KERNELS:
        decoded = torch.full_like(positions, -1)
        kernels.bitmap_decode(payloads[0], universe, decoded)
        assert torch.equal(decoded, positions)


@pytest.mark.parametrize("kernels", KERNELS, ids=["cpu", "reference"])
def test_other_bits_are_rejected(kernels: object) -> None:
    for wrong in ([0b111, 0, 0, 0], [0b1, 0, 0, 0], [0b1, 0, 0b1000, 0], [0b1, 0, 0, 0x80]):
        payload, memory = torch.tensor(wrong, dtype=torch.uint8), torch.full((4,), -7)
        with pytest.raises(PayloadError, match="2 bits set, all of them below 19"):
            kernels.bitmap_decode(payload, 19, memory[1:3])
        assert memory[0] == memory[3] == -7
