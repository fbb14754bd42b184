"""The kernels in Numba, one thread, without the interpreter lock: the bits of the reference, at memory speed.

Every function is compiled on its first call, or read from a cache on disk; :func:`warm_up` does so for all.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.cpu._compiled import add_compensated, values_and_memory
from gradwire.kernels.cpu.dynamic import dynamic_decode, dynamic_encode
from gradwire.kernels.cpu.elias_fano import elias_fano_decode, elias_fano_encode
from gradwire.kernels.cpu.exponent import exponent_decode, exponent_encode
from gradwire.kernels.cpu.inceptionn import inceptionn_decode, inceptionn_encode
from gradwire.kernels.cpu.lowrank import project_columns, project_rows, write_product
from gradwire.kernels.cpu.power_of_two import power_of_two_decode, power_of_two_encode
from gradwire.kernels.cpu.quantile import quantile_decode, quantile_encode
from gradwire.kernels.cpu.sign import sign_decode, sign_encode
from gradwire.kernels.cpu.sparse import gather, randomk_positions, scatter, scatter_sum, subtract
from gradwire.kernels.cpu.stochastic import stochastic_decode, stochastic_encode
from gradwire.kernels.cpu.ternary import ternary_encode
from gradwire.kernels.cpu.three_level import three_level_encode
from gradwire.kernels.cpu.threshold import (
    collect_local_maxima,
    collect_reaching,
    collect_unambiguous,
    exceedances,
    magnitude_statistics,
    sign_counts,
)
from gradwire.kernels.cpu.topk import topk_select
from gradwire.kernels.cpu.trits import trits_decode
from gradwire.kernels.cpu.two_means import two_means_decode, two_means_encode
from gradwire.kernels.cpu.vote import vote_encode
from gradwire.kernels.cpu.zero_runs import zero_runs_decode, zero_runs_encode
from gradwire.kernels.reference import (
    dynamic_payload_bytes,
    elias_fano_bytes,
    exponent_payload_bytes,
    inceptionn_bytes,
    power_of_two_payload_bytes,
    quantile_payload_bytes,
    sign_payload_bytes,
    stochastic_payload_bytes,
    trits_payload_bytes,
    two_means_payload_bytes,
)
from gradwire.layout import Block, Granularity, flat_slots

__all__ = [
    "accumulate",
    "collect_local_maxima",
    "collect_reaching",
    "collect_unambiguous",
    "dynamic_decode",
    "dynamic_encode",
    "dynamic_payload_bytes",
    "elias_fano_bytes",
    "elias_fano_decode",
    "elias_fano_encode",
    "exceedances",
    "exponent_decode",
    "exponent_encode",
    "exponent_payload_bytes",
    "gather",
    "inceptionn_bytes",
    "inceptionn_decode",
    "inceptionn_encode",
    "magnitude_statistics",
    "power_of_two_decode",
    "power_of_two_encode",
    "power_of_two_payload_bytes",
    "project_columns",
    "project_rows",
    "quantile_decode",
    "quantile_encode",
    "quantile_payload_bytes",
    "randomk_positions",
    "scatter",
    "scatter_sum",
    "sign_counts",
    "sign_decode",
    "sign_encode",
    "sign_payload_bytes",
    "stochastic_decode",
    "stochastic_encode",
    "stochastic_payload_bytes",
    "subtract",
    "ternary_encode",
    "three_level_encode",
    "topk_select",
    "trits_decode",
    "trits_payload_bytes",
    "two_means_decode",
    "two_means_encode",
    "two_means_payload_bytes",
    "vote_encode",
    "warm_up",
    "write_product",
    "zero_runs_decode",
    "zero_runs_encode",
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
    vote_encode(block, gradient, residual, 1.0, 1.0, signs[0], 0)
    sides = torch.empty(1, two_means_payload_bytes(block), dtype=torch.uint8)
    two_means_encode(block, gradient, residual, 1.0, 1.0, sides[0])
    two_means_decode(block, sides, out, 1.0)
    trits = torch.empty(1, trits_payload_bytes(block), dtype=torch.uint8)
    ternary_encode(block, gradient, residual, 1.0, 1.0, trits[0], 2.5, 0)
    three_level_encode(block, gradient, residual, 1.0, 1.0, trits[0], 1.0)
    trits_decode(block, trits, out, 1.0)
    for bits in (8, 9):
        powers = torch.empty(1, power_of_two_payload_bytes(block, bits), dtype=torch.uint8)
        power_of_two_encode(block, gradient, residual, 1.0, 1.0, powers[0], bits, 0)
        power_of_two_decode(block, powers, out, 1.0, bits)
    entries = torch.empty(1, dynamic_payload_bytes(block), dtype=torch.uint8)
    dynamic_encode(block, gradient, residual, 1.0, 1.0, entries[0])
    dynamic_decode(block, entries, out, 1.0)
    exponents = torch.empty(1, exponent_payload_bytes(block), dtype=torch.uint8)
    exponent_encode(block, gradient, residual, 1.0, 1.0, exponents[0])
    exponent_decode(block, exponents, out, 1.0)
    coded = torch.empty(8, dtype=torch.uint8)
    zero_runs_decode(coded[: zero_runs_encode(trits[0, 4:12], coded)], trits[0, 4:12])
    quantiles = torch.empty(1, quantile_payload_bytes(block, 4), dtype=torch.uint8)
    quantile_encode(block, gradient, residual, 1.0, 1.0, quantiles[0], 4)
    quantile_decode(block, quantiles, out, 1.0, 4)
    bounded = torch.empty(inceptionn_bytes(16), dtype=torch.uint8)
    inceptionn_decode(bounded[: inceptionn_encode(gradient, 10, bounded)], 10, out)
    levels = torch.empty(1, stochastic_payload_bytes(block, 4, 0), dtype=torch.uint8)
    stochastic_encode(block, gradient, residual, 1.0, 1.0, levels[0], 4, 0, False, 0, False)
    stochastic_decode(block, levels, out, 1.0, 4, 0)
    counts = np.array([2], dtype=np.int64)
    positions, values = torch.empty(1, 2, dtype=torch.int64), torch.empty(1, 2)
    topk_select(block, gradient, residual, 1.0, 1.0, counts, positions[0], values[0])
    packed = torch.empty(elias_fano_bytes(2, block.positions), dtype=torch.uint8)
    elias_fano_encode(positions[0], block.positions, packed)
    elias_fano_decode(packed, block.positions, positions[0])
    gather(block, gradient, positions[0], values[0])
    subtract(block, residual, positions[0], values[0])
    scatter(block, out, positions[0], values[0])
    thresholds = np.array([0.5], dtype=np.float32)
    magnitude_statistics(block, gradient, residual, 1.0, 1.0)
    sign_counts(block, gradient)
    exceedances(block, gradient, thresholds)
    collect_reaching(block, gradient, thresholds, 2)
    collect_unambiguous(block, gradient, residual, 1.0, 1.0, None, out, 1.5, 0.9, 0.0, 2)
    collect_local_maxima(block, gradient, residual, 1.0, 1.0, np.array([8]), 2)
    scatter_sum(block, positions, values, out, 1.0)
    scatter_sum(block, positions.flip(1), values, out, 1.0)
    randomk_positions(block, counts, positions[0], 0)
    p, q = torch.ones(1, 4), torch.ones(1, 4)
    project_rows(block, gradient, residual, 1.0, 1.0, q, p, True)
    project_columns(block, gradient, residual, 1.0, 1.0, p, q, True)
    write_product(block, p, q, out, residual)
