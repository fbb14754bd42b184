"""What turns a block of values into something to send, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.errors import PayloadError
from gradwire.layout import Block, Slot
from gradwire.memory import Feedback, Remainder, Store
from gradwire.plain import Plain

FORMAT_VERSION = 3
"""Of all payloads, as ``docs/formats.md`` describes them: another one whenever bytes mean something else."""


class Codec(Plain, ABC):
    """Writes a block as bytes of a size that every rank knows before they are written.

    In plain torch, ``values, finite = feedback.compensate(block, gradient)`` is what :meth:`encode` is to send, and
    where it leaves what it did not if there is a ``feedback.residual``; where ``finite`` is false the residual stays,
    and the payload must make every rank's average not finite. ``block.segmented(values)`` has the segments, copies of
    those that lie in several places; ``block.segment_numels`` their sizes.
    """

    selects: ClassVar[bool] = False
    """Whether it sends some coordinates and says which, as memories that mask them need."""

    def remainder(self, most: int) -> Remainder:
        """What error feedback makes of what it leaves out of segments of up to ``most`` values."""
        return "shrinks"

    def at(self, step: int) -> Codec:
        """The codec as it is in one step; a schedule may change its size.

        Args:
            step: Counts synchronisations, from 0, the same on every rank.
        """
        return self

    def installed(self, store: Store, slots: Sequence[Slot], numel: int) -> Codec:
        """The codec at home in one flat buffer, for what it remembers beyond the memory's residual.

        Args:
            store: Where tensors are kept by parameter name.
            slots: The parameters in the buffer that are compressed.
            numel: Elements of the buffer.
        """
        return self

    def owned(self) -> Codec:
        """The codec as an owner of averages has it: what it remembers is kept apart from what workers remember."""
        return self

    @abstractmethod
    def payload_bytes(self, block: Block) -> int:
        """Size of a payload: a multiple of 4 bytes, so that payloads stay aligned when they are fused.

        It may depend on how long runs are, of which parameters and in which segments, and how far into a unit they
        begin; so that owners of which there are thousands need not be asked one by one.
        """

    @abstractmethod
    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, payload: Tensor, key: int) -> None:
        """Writes the compensated values of ``block`` and leaves what was not sent in the feedback's residual.

        Args:
            block: Which elements, in which segments.
            gradient: ``float32``, the flat buffer the block lies in; not changed.
            feedback: The memory's share.
            payload: ``uint8[payload_bytes(block)]``, to be filled.
            key: Randomness of this rank and step.
        """

    @abstractmethod
    def decode(self, block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
        """Writes ``weight`` times the sum of the decoded payloads to the block's elements of ``out``.

        Args:
            block: As encoded; its starts may lie in another buffer.
            payloads: ``uint8[n, payload_bytes(block)]``, summed in row order so that every rank gets the same bits.
            out: ``float32`` flat buffer.
            weight: Usually 1 / n.

        Raises:
            PayloadError: If the bytes are not what any encoder writes; then nothing has been written.
        """

    def encode_each(
        self, blocks: Sequence[Block], gradient: Tensor, feedback: Feedback, payloads: Tensor, key: int
    ) -> None:
        """As :meth:`encode` does, block by block.

        Args:
            blocks: Of one buffer, each for a payload of its own.
            gradient: As there.
            feedback: As there.
            payloads: ``uint8[len(blocks), b]``, of at least the largest size; what a row has more than that is zeros.
            key: As there.
        """
        for block, payload in zip(blocks, payloads, strict=True):
            size = self.payload_bytes(block)
            self.encode(block, gradient, feedback, payload[:size], key)
            payload[size:] = 0

    def decode_each(self, blocks: Sequence[Block], payloads: Tensor, out: Tensor) -> None:
        """Writes what one payload a block stands for, as :meth:`decode` does; rows as :meth:`encode_each` writes."""
        for block, payload in zip(blocks, payloads, strict=True):
            self.decode(block, payload[None, : self.payload_bytes(block)], out, 1.0)

    def news_each(self, blocks: Sequence[Block], payloads: Tensor) -> Tensor:
        """What :meth:`news` says of one payload a block, in rows; those of payloads as :meth:`encode_each` writes."""
        if not self.news_bytes:
            return payloads.new_empty(len(payloads), 0)
        rows = zip(blocks, payloads, strict=True)
        return torch.stack([self.news(block, payload[None, : self.payload_bytes(block)]) for block, payload in rows])

    def check(self, block: Block, payloads: Tensor) -> None:
        """To be called first by :meth:`decode`, since kernels rely on what it checks.

        Raises:
            PayloadError: Unless payloads are ``uint8[n, payload_bytes(block)]`` with ``n >= 1``.
        """
        size = self.payload_bytes(block)
        if payloads.dtype != torch.uint8 or payloads.dim() != 2 or not len(payloads) or payloads.shape[1] != size:
            raise PayloadError(
                f"payloads are {payloads.dtype} of shape {tuple(payloads.shape)}, and not one row or more of {size} "
                "bytes; were they encoded with another configuration?"
            )

    @property
    def news_bytes(self) -> int:
        """Size of :meth:`news`: a multiple of 4, the same for every block and rank."""
        return 0

    def news(self, block: Block, payloads: Tensor) -> Tensor:
        """What some payloads say of the room that those of the next step need: ``uint8[news_bytes]``.

        There are none of payloads whose size depends on nothing.

        Args:
            block: As encoded.
            payloads: ``uint8[n, payload_bytes(block)]``, as :meth:`decode` took them.
        """
        return torch.empty(0, dtype=torch.uint8, device=payloads.device)

    def heard(self, block: Block, news: Tensor) -> None:
        """Makes the room of the next step, the same on every rank because all of them hear the same.

        Args:
            block: All that this codec writes in a step, or all of its shards together.
            news: ``uint8[k, news_bytes]``, from every rank that decodes for others; or only this one's, where all
                decode alike.
        """
        return


Decode = Callable[[Tensor, Tensor], None]
"""``decode(mean, out)`` writes an averaged code to its block's elements of a ``float32`` flat buffer."""


class LinearCodec(ABC):
    """Writes a block as floating-point numbers whose mean over workers decodes to the mean: it all-reduces."""

    selects: ClassVar[bool] = False
    """Whether it sends some coordinates and says which, as memories that mask them need."""

    @abstractmethod
    def encode(self, block: Block, gradient: Tensor, feedback: Feedback, key: int) -> tuple[Tensor, Decode]:
        """Writes the compensated values and leaves what was not sent in the feedback's residual.

        Args:
            block: Which elements, in which segments.
            gradient: ``float32``, the flat buffer the block lies in; the code may be a view of it.
            feedback: The memory's share.
            key: Randomness that all ranks share in this step.

        Returns:
            The code, and what decodes the mean of all workers' codes.
        """
