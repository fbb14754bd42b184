"""Products with thin factors."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.deferred import Flag
from gradwire.kernels.compensated import Compensated
from gradwire.kernels.reference._torch import formed, keep
from gradwire.layout import Block


def project_rows(block: Block, source: Compensated, q: Tensor, p: Tensor, subtract: Tensor | None) -> Flag:
    """``p = q @ t.T`` for a block of one matrix ``t [n, m]``, ``q [r, m]``, ``p [r, n]``.

    Leaves ``t``, or ``t - p.T @ subtract``, in the residual. Returns whether ``t`` is finite; if not, ``p`` is NaN and
    nothing is subtracted.
    """
    t = _matrix(block, source, p, q)
    p.copy_(q @ t.mT)
    return _leave(block, t, source.residual, p, subtract, p)


def project_columns(block: Block, source: Compensated, p: Tensor, q: Tensor, subtract: Tensor | None) -> Flag:
    """``q = p @ t``, and ``subtract.T @ q`` is subtracted; otherwise as :meth:`project_rows`."""
    t = _matrix(block, source, p, q)
    q.copy_(p @ t)
    return _leave(block, t, source.residual, subtract, q, q)


def write_product(block: Block, p: Tensor, q: Tensor, out: Tensor, residual: Tensor | None) -> None:
    """``out = p.T @ q`` over a block of one matrix, taken from the residual if one is given.

    Terms are added in their order, each product and sum rounded once, as all ranks must.
    """
    whole = _whole(block)
    product = torch.zeros(p.shape[1], q.shape[1], dtype=torch.float32, device=p.device)
    for column, row in zip(p.double(), q.double(), strict=True):
        product = (product + column[:, None] * row).float()
    out[whole] = product.flatten()
    if residual is not None:
        keep(residual[whole], residual[whole] - product.flatten())


def _whole(block: Block) -> slice:
    start, length, _ = block.runs[0].tolist()
    return slice(start, start + length)


def _matrix(block: Block, source: Compensated, p: Tensor, q: Tensor) -> Tensor:
    whole = _whole(block)
    return formed(source, whole.start, whole.stop)[0].view(p.shape[1], q.shape[1])


def _leave(
    block: Block, t: Tensor, residual: Tensor | None, p: Tensor | None, q: Tensor | None, computed: Tensor
) -> Flag:
    """Leaves in the residual what is not sent, all of ``t`` unless there are both factors.

    The computed factor is marked if it is not finite, as ``t`` then is not.
    """
    finite = computed.isfinite().all()
    left = t if p is None or q is None else torch.where(finite, t - p.mT @ q, t)
    keep(None if residual is None else residual[_whole(block)], left.flatten())
    computed.masked_fill_(~finite, torch.nan)
    return finite
