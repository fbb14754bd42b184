"""Methods without values: tensors on torch's meta device have sizes only, and kernels for them do nothing.

What a method sends is thereby known for any model and any number of workers, at once and without memory. Codecs write
nothing there, so that what depends on data has the size that it has before any was seen. A method that is no codec and
reads what it computes cannot run so; :func:`runs` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.deferred import Flag
from gradwire.engine.configuration import Configuration
from gradwire.engine.engine import Engine
from gradwire.engine.unit import Share
from gradwire.layout import Block, Slot, flat_slots
from gradwire.memory import NONE, Feedback
from gradwire.methods import LinearMethod
from gradwire.methods.method import CodecState
from gradwire.wire import AllGather, lockstep

META = torch.device("meta")


@dataclass(frozen=True)
class Sizes(Codec):
    """A codec that knows the sizes of another's payloads, and leaves them empty.

    Attributes:
        codec: The other.
    """

    codec: Codec

    def at(self, step: int) -> Sizes:
        """The other's of a step."""
        return Sizes(self.codec.at(step))

    def payload_bytes(self, block: Block) -> int:
        """The other's."""
        return self.codec.payload_bytes(block)

    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Nothing."""

    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Nothing but the other's check of sizes."""
        self.check(block, payloads)

    def encode_each(
        self, blocks: Sequence[Block], gradient: Tensor, feedback: Feedback, payloads: Tensor, key: int
    ) -> None:
        """Nothing."""

    def decode_each(self, blocks: Sequence[Block], payloads: Tensor, out: Tensor) -> None:
        """Nothing."""

    def news(self, block: Block, payloads: Tensor) -> Tensor:
        """As many bytes as the other's."""
        return payloads.new_empty(self.codec.news_bytes)


@dataclass(frozen=True, eq=False)
class _Unread(Feedback):
    """No memory, which takes values for finite without looking."""

    def compensate(self, block: Block, gradient: Tensor) -> tuple[Tensor, Flag]:
        return gradient, torch.empty((), dtype=torch.bool, device=META)


_ALL_FINITE = _Unread(None)


class SizesOnly(Engine):
    """An engine on the meta device whose codecs write nothing, and remember nothing."""

    def _made(self, slots: Sequence[Slot]) -> tuple[Share, ...]:
        """The same, less all values."""
        return tuple(map(_sized, super()._made(slots)))


def _sized(share: Share) -> Share:
    state = share.state
    if isinstance(state, CodecState):
        owner = None if state.owner is None else Sizes(state.owner)
        return replace(
            share,
            state=replace(state, worker=Sizes(state.worker), feedback=NONE, owner=owner, owner_feedback=NONE),
        )
    if isinstance(share.method, LinearMethod) or getattr(share.state, "feedback", None) is NONE:
        return replace(share, state=replace(share.state, feedback=_ALL_FINITE))
    return share


def runs(configuration: Configuration) -> bool:
    """Whether a method runs without values."""
    engine = SizesOnly(configuration, 0, 2, META)
    unit = engine.unit(flat_slots([("matrix", (72, 48)), ("vector", (70,))]))
    for _ in range(2):
        rounds = lockstep(engine.synchronizations(unit, torch.empty(unit.numel, device=META, dtype=torch.float32)))
        try:
            asked = next(rounds, None)
            while asked is not None:
                asked = rounds.send(
                    [each.payload.expand(2, -1) if isinstance(each, AllGather) else each.payload for each in asked]
                )
        except StopIteration:
            engine.step += 1
        except (RuntimeError, NotImplementedError):
            return False
    return True
