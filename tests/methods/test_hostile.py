"""No answer of another worker, whatever its bytes, crashes a rank, writes where it should not, or divides the kernels.

`tests/fuzz.py` holds the same laws for as long as one likes.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gradwire
from gradwire import methods
from gradwire.errors import PayloadError
from gradwire.methods.method import CodecMethod
from gradwire.routes import check_largest
from hostile import Decoding, decodings, named_decodings, spoilt, victims
from pool import ranks

EXAMPLES = 8
SHAPES = range(1, 14)
LOOKED_AT = 3
"""Attachments and blocks, evenly spread, that get answers of every wrong shape."""

changes = st.tuples(*[st.integers(0, 255)] * 4).map(bytes)
programs = st.lists(changes, min_size=1, max_size=4).map(lambda each: b"\0" + b"".join(each))
places = st.integers(0, 2**16)
fixed = settings(derandomize=True, database=None, deadline=None, max_examples=EXAMPLES)


def other_shapes(answer: Tensor) -> list[bytes]:
    """Programs that do nothing but make another shape or type of an answer."""
    made = {bytes([how]): spoilt(answer, bytes([how])) for how in SHAPES}
    return [how for how, other in made.items() if (other.shape, other.dtype) != (answer.shape, answer.dtype)]


def lie_to_decoders(found: list[Decoding]) -> None:
    @fixed
    @given(places, programs)
    def lie(place: int, program: bytes) -> None:
        found[place % len(found)].check(program)

    lie()
    for each in found[:: -(-len(found) // LOOKED_AT)]:
        size = each.honest.shape[1]
        assert each.check(b""), f"{each.name} refused what it wrote"
        for program in other_shapes(each.honest):
            rows = spoilt(each.honest, program)
            fits = rows.dim() == 2 and len(rows) > 0 and rows.shape[1] == size and rows.dtype == torch.uint8
            assert each.check(program, only_compiled=True) == fits, f"{each.name}: {tuple(rows.shape)} {rows.dtype}"


@pytest.mark.parametrize("name", [name for name in methods.names() if issubclass(methods.get(name), CodecMethod)])
@ranks(1)
def test_decoders_refuse_or_decode_any_bytes(name: str) -> None:
    lie_to_decoders(decodings(name))


@ranks(1)
def test_named_codecs_refuse_or_decode_any_bytes() -> None:
    lie_to_decoders(named_decodings())


@pytest.mark.parametrize("name", methods.names())
@ranks(1)
def test_methods_live_through_any_answer_or_refuse_it(name: str) -> None:
    found = victims(name)

    @fixed
    @given(places, places, programs)
    def lie(place: int, number: int, program: bytes) -> None:
        found[place % len(found)].check(number, program)

    lie()
    for number, victim in enumerate(found[:: -(-len(found) // LOOKED_AT)]):
        assert victim.check(number, b""), f"{victim.case} refused what honest workers sent"
        for program in other_shapes(victim.recorded[number % len(victim.recorded)]):
            assert not victim.check(number, program, only_compiled=True), f"{victim.case} took another shape"


@pytest.mark.parametrize("method", ["atomo", "gradiveq"])
def test_values_of_very_different_sizes_decompose(method: str) -> None:
    """Squares of the small ones are denormal numbers, on which an eigendecomposition may not converge."""
    options = {"gradiveq": {"slice": 32, "rank": 8, "learn_steps": 1, "use_steps": 1}}.get(method, {})
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        tensor = torch.randn(24, 32, generator=generator)
        places = torch.randint(0, tensor.numel(), (3,), generator=generator)
        tensor.view(-1)[places] *= 10 ** torch.empty(3).uniform_(15, 30, generator=generator)
        assert gradwire.roundtrip(tensor, method, **options).decoded.isfinite().all()


def test_scales_below_ones_own_are_refused() -> None:
    own = torch.tensor([1.0, 2.0, torch.inf])
    check_largest(torch.tensor([1.0, 3.0, torch.inf]), own)
    for lie in (0.5, -1.0, torch.nan):
        with pytest.raises(PayloadError, match=f"{lie}, but this worker's is 1.0"):
            check_largest(torch.tensor([lie, 3.0, torch.inf]), own)
