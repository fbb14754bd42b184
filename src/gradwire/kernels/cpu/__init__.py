"""The kernels in Numba, one thread, without the interpreter lock: the bits of the reference, at memory speed.

Every function is compiled on its first call, or read from a cache on disk; :func:`warm_up` does so for all.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.cpu._compiled import add_compensated, values_and_memory
from gradwire.kernels.cpu.bitmap import bitmap_decode, bitmap_encode
from gradwire.kernels.cpu.elias_fano import elias_fano_decode, elias_fano_encode
from gradwire.kernels.cpu.inceptionn import inceptionn_decode, inceptionn_encode
from gradwire.kernels.cpu.lowrank import project_columns, project_rows, write_product
from gradwire.kernels.cpu.quantile import quantile_decode, quantile_encode
from gradwire.kernels.cpu.sign import sign_decode, sign_encode
from gradwire.kernels.cpu.sparse import gather, randomk_positions, scatter_sum, subtract
from gradwire.kernels.cpu.stochastic import stochastic_decode, stochastic_encode
from gradwire.kernels.cpu.topk import topk_select
from gradwire.kernels.reference import (
    elias_fano_bytes,
    inceptionn_payload_bytes,
    quantile_payload_bytes,
    sign_payload_bytes,
    stochastic_payload_bytes,
)
from gradwire.layout import Block, Granularity, flat_slots

__all__ = [
    "accumulate",
    "bitmap_decode",
    "bitmap_encode",
    "elias_fano_bytes",
    "elias_fano_decode",
    "elias_fano_encode",
    "gather",
    "inceptionn_decode",
    "inceptionn_encode",
    "inceptionn_payload_bytes",
    "project_columns",
    "project_rows",
    "quantile_decode",
    "quantile_encode",
    "quantile_payload_bytes",
    "randomk_positions",
    "scatter_sum",
    "sign_decode",
    "sign_encode",
    "sign_payload_bytes",
    "stochastic_decode",
    "stochastic_encode",
    "stochastic_payload_bytes",
    "subtract",
    "topk_select",
    "warm_up",
    "write_product",
]


def accumulate(block: Block, gradient: Tensor, residual: Tensor, beta: float, gamma: float) -> bool:
    """See :meth:`gradwire.kernels.Kernels.accumulate`."""
    values, memory, _ = values_and_memory(gradient, residual)
    return bool(add_compensated(block.runs, values, memory, np.float32(beta), np.float32(gamma)))


def warm_up() -> None:
    """Compiles everything, so that nothing is left to compile within a training step."""
    block = Block.cut(flat_slots([("warm-up", (16,))]), Granularity("layer"))
    gradient, residual = torch.linspace(-1, 1, 16), torch.zeros(16)
    out = torch.empty(16)
    accumulate(block, gradient, residual, 1.0, 1.0)
    signs = torch.empty(2, sign_payload_bytes(block), dtype=torch.uint8)
    sign_encode(block, gradient, residual, 1.0, 1.0, signs[0])
    sign_decode(block, signs[:1], out, 1.0)
    levels = torch.empty(1, stochastic_payload_bytes(block, 4, 0), dtype=torch.uint8)
    stochastic_encode(block, gradient, residual, 1.0, 1.0, levels[0], 4, 0, False, 0)
    stochastic_decode(block, levels, out, 1.0, 4, 0)
    means = torch.empty(1, quantile_payload_bytes(block, 4, 1, 0.5), dtype=torch.uint8)
    quantile_encode(block, gradient, residual, 1.0, 1.0, means[0], 4, 1, 0.5, 0)
    quantile_decode(block, means, out, 1.0, 4, 1, 0.5)
    floats = torch.empty(1, inceptionn_payload_bytes(block, 8), dtype=torch.uint8)
    inceptionn_encode(block, gradient, residual, 1.0, 1.0, floats[0], 10)
    inceptionn_decode(block, floats, out, 1.0, 10)
    counts = np.array([2], dtype=np.int64)
    positions, values = torch.empty(1, 2, dtype=torch.int64), torch.empty(1, 2)
    topk_select(block, gradient, residual, 1.0, 1.0, counts, positions[0], values[0])
    packed = torch.empty(elias_fano_bytes(2, block.positions), dtype=torch.uint8)
    elias_fano_encode(positions[0], block.positions, packed)
    elias_fano_decode(packed, block.positions, positions[0])
    bits = torch.empty(4, dtype=torch.uint8)
    bitmap_encode(positions[0], block.positions, bits)
    bitmap_decode(bits, block.positions, positions[0])
    gather(block, gradient, positions[0], values[0])
    subtract(block, residual, positions[0], values[0])
    scatter_sum(block, positions, values, out, 1.0)
    scatter_sum(block, positions.flip(1), values, out, 1.0)
    randomk_positions(block, counts, positions[0], 0)
    p, q = torch.ones(1, 4), torch.ones(1, 4)
    project_rows(block, gradient, residual, 1.0, 1.0, q, p, True)
    project_columns(block, gradient, residual, 1.0, 1.0, p, q, True)
    write_product(block, p, q, out, residual)
