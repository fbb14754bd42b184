"""Codecs of one's own, in plain torch as the docstring of ``Codec`` has it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.codecs.codec import Codec
from gradwire.codecs.index import Raw
from gradwire.codecs.quantize.values import FloatValues
from gradwire.layout import Block, Slot
from gradwire.memory import Feedback, Kind, Memory, Store
from gradwire.methods import CodecMethod


@dataclass(frozen=True)
class Plain(Codec):
    """Every value as it is."""

    def payload_bytes(self, block: Block) -> int:
        """Four bytes a value."""
        return 4 * block.numel

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Copies the runs one after the other; nothing is left."""
        values, finite = feedback.compensate(block, gradient)
        torch.cat([payload[:0].view(torch.float32), *block.parts(values)], out=payload.view(torch.float32))
        if not finite:
            payload.view(torch.float32).fill_(math.nan)
        elif feedback.residual is not None:
            for part in block.parts(feedback.residual):
                part.zero_()

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Copies them back."""
        self.check(block, payloads)
        mean = payloads.contiguous().view(torch.float32).sum(0) * weight
        for part, values in zip(block.parts(out), mean.split([len(part) for part in block.parts(out)]), strict=True):
            part.copy_(values)


@dataclass(frozen=True)
class Mine(CodecMethod):
    """All as it is."""

    def codec(self) -> Codec:
        """The codec above."""
        return Plain()


@dataclass(frozen=True)
class Cutting(Plain):
    """Cuts off large values, where they were given to it."""

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Changes what memories have admitted."""
        super().encode(block, gradient.clamp_(-0.5, 0.5), feedback, payload, key)


@dataclass(frozen=True)
class CutMine(CodecMethod):
    """All, but cut off."""

    def codec(self) -> Codec:
        """The codec above."""
        return Cutting()


@pytest.mark.parametrize("memory", ["none", "residual"])
@pytest.mark.parametrize("route", ["gather", "sharded"])
def test_a_codec_in_plain_torch_keeps_the_laws_also_where_an_owner_has_nothing(route: str, memory: str) -> None:
    found = gradwire.check(Mine(), route=route, memory=memory)
    assert found.holds, found


def test_a_codec_in_plain_torch_writes_values_also_where_none_were_chosen() -> None:
    found = gradwire.check("threshold", values=Plain(), threshold=3.0)
    assert found.holds, found


@dataclass(frozen=True)
class Cut(FloatValues):
    """Cuts off large values, where they were given to it."""

    def encode(self, chosen: Block, values: Tensor, payload: Tensor, key: int) -> None:
        """Changes what the residual is made of."""
        super().encode(chosen, values.clamp_(-0.5, 0.5), payload, key)


@dataclass(frozen=True)
class Turned(Raw):
    """Writes from the last position to the first, as values are not."""

    def decode(self, payload: Tensor, universe: int, positions: Tensor) -> int:
        """Ascending, distinct, and not as written."""
        super().decode(payload, universe, positions)
        positions.copy_(universe - 1 - positions.flip(0))
        return positions.numel()


@dataclass(frozen=True)
class Sorted(Raw):
    """Flips the positions it was given."""

    def encode(self, positions: Tensor, universe: int, payload: Tensor) -> int:
        """Changes what the residual is made of."""
        return super().encode(positions.copy_(positions.flip(0)), universe, payload)


@pytest.mark.parametrize("method", ["topk", "threshold", "sidco", "variance", "demo"])
def test_a_value_coding_that_changes_the_values_it_is_given_is_told(method: str) -> None:
    with pytest.raises(gradwire.ConfigurationError, match=r"Cut\.encode changed the values .* values\.clone"):
        gradwire.roundtrip(torch.randn(64, 64), method, values=Cut())


@pytest.mark.parametrize("method", ["topk", "scalecom", "gtopk", "adacomp"])
def test_an_index_coding_that_changes_the_positions_it_is_given_is_told(method: str) -> None:
    with pytest.raises(gradwire.ConfigurationError, match=r"Sorted\.encode changed the positions"):
        gradwire.roundtrip(torch.randn(64, 64), method, indices=Sorted())


@pytest.mark.parametrize("route", ["gather", "sharded"])
def test_a_codec_that_changes_the_gradient_it_is_given_is_told(route: str) -> None:
    with pytest.raises(gradwire.ConfigurationError, match=r"Cutting\.encode changed the gradient"):
        gradwire.roundtrip(torch.randn(64, 64), CutMine(), route=route, memory="momentum")


@dataclass(frozen=True)
class Own(Memory):
    """Keeps what it was given, whatever a method needs."""

    kept: Any

    def feedback(self, store: Store, field: str, slots: Sequence[Slot], numel: int, kind: Kind = Kind.MEAN) -> Feedback:
        """As the test has it."""
        found: Feedback = self.kept(numel)
        return found


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (lambda numel: None, "NoneType"),
        (lambda numel: Feedback(torch.zeros(numel - 1)), r"a residual of torch.float32, \(79,\)"),
        (lambda numel: Feedback(torch.zeros(numel, dtype=torch.float64)), r"a residual of torch.float64, \(80,\)"),
        (lambda numel: Feedback(torch.zeros(2 * numel)[::2]), r"a residual of torch.float32, \(80,\)"),
    ],
)
@pytest.mark.parametrize("route", ["gather", "sharded"])
def test_a_memory_without_a_residual_that_kernels_can_write_to_is_told(kept: Any, said: str, route: str) -> None:
    with pytest.raises(gradwire.ConfigurationError, match=rf"Own\.feedback gave {said}; give a Feedback with float32"):
        gradwire.roundtrip(torch.randn(8, 10), "topk", memory=Own(kept), route=route)


def test_a_check_tells_an_index_coding_that_reads_others_than_it_wrote() -> None:
    said = {each.law: each for each in gradwire.check("adacomp", indices=Turned(), memory="none").findings}
    found = said["positions are read as they were written"]
    assert found.holds is False
    assert found.said.startswith("Turned was given 7 positions below 40, 2, 6, 7, ..., and reads 2, 4, 13, ...:"), found
