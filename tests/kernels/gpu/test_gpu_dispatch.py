"""What the GPU has of the reference."""

from __future__ import annotations

import inspect
from typing import get_type_hints

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'gradwire[gpu]'")

from gradwire.kernels import codes, dispatch, gpu, reference

OWN = [name for name in dispatch.KERNELS if hasattr(gpu, name)]


@pytest.mark.parametrize("name", OWN)
def test_an_override_has_the_signature_of_the_reference(name: str) -> None:
    override, specified = getattr(gpu, name), getattr(reference, name)
    assert inspect.signature(override) == inspect.signature(specified)
    assert override is not specified
    assert get_type_hints(override) == get_type_hints(specified)


def test_every_code_is_here() -> None:
    assert set(gpu.CODES) == set(codes.ALL)
    assert {"encode", "decode", "accumulate", "scatter_sum", "checksums"} <= set(OWN)
