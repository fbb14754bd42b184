"""Codes that can be averaged as they are."""

from __future__ import annotations

from torch import Tensor

from gradwire.codecs.codec import LinearCodec
from gradwire.layout import Block
from gradwire.memory import Feedback
from gradwire.wire.requests import AllReduceMean, Synchronization


def allreduce(codec: LinearCodec, block: Block, gradient: Tensor, feedback: Feedback, key: int) -> Synchronization:
    """Averages the codes, then decodes once: 2 b (n - 1) / n bytes for a code of b bytes.

    Args:
        codec: A linear codec.
        block: Which elements of ``gradient``.
        gradient: ``float32`` flat buffer; left with the average.
        feedback: This worker's memory.
        key: Randomness that all ranks share in this step.
    """
    admitted = feedback.before_encode(block, gradient)
    code, decode = codec.encode(block, admitted, feedback, key)
    if admitted is not gradient:
        code = code.clone()  # it may be a view of what the memory keeps, and the wire reduces in place
    feedback.after_encode(block, admitted)
    mean = yield AllReduceMean(code)
    decode(mean, gradient)
    feedback.after_decode(block, gradient)
