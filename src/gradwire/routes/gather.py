"""Every payload to every worker."""

from __future__ import annotations

from torch import Tensor

from gradwire.layout import Block
from gradwire.routes.operator import Operator
from gradwire.wire.requests import AllGather, Synchronization


def gather(
    worker: Operator, owner: Operator | None, block: Block, gradient: Tensor, world_size: int
) -> Synchronization:
    """Decodes all payloads everywhere: b (n - 1) bytes for a payload of b bytes.

    Args:
        worker: What writes the payload.
        owner: What the average is put through, the same on every rank; or nothing.
        block: Which elements of ``gradient``.
        gradient: ``float32`` flat buffer; left with the average.
        world_size: n.
    """
    admitted = worker.feedback.before_encode(block, gradient)
    payload = worker.encode(block, admitted)
    worker.feedback.after_encode(block, admitted)
    payloads = yield AllGather(payload)
    worker.codec.decode(block, payloads, gradient, 1 / world_size)
    worker.codec.heard(block, worker.codec.news(block, payloads)[None])
    if owner is not None:
        readmitted = owner.feedback.before_encode(block, gradient)
        again = owner.encode(block, readmitted)
        owner.feedback.after_encode(block, readmitted)
        owner.codec.decode(block, again[None], gradient, 1.0)
    worker.feedback.after_decode(block, gradient)
