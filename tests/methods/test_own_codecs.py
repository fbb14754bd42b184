"""Codecs of one's own, in plain torch as the docstring of ``Codec`` has it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.codecs.codec import Codec
from gradwire.layout import Block
from gradwire.memory import Feedback
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


@pytest.mark.parametrize("memory", ["none", "residual"])
@pytest.mark.parametrize("route", ["gather", "sharded"])
def test_a_codec_in_plain_torch_keeps_the_laws_also_where_an_owner_has_nothing(route: str, memory: str) -> None:
    found = gradwire.check(Mine(), route=route, memory=memory)
    assert found.holds, found


def test_a_codec_in_plain_torch_writes_values_also_where_none_were_chosen() -> None:
    found = gradwire.check("threshold", values=Plain(), threshold=3.0)
    assert found.holds, found
