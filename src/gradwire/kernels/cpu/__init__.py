"""The kernels in Numba, one thread, without the interpreter lock: the bits of the reference, at memory speed.

Every function is compiled on its first call, once, or read from a cache on disk; an attachment rehearses its method, so
that nothing is left to compile within a training step.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu._compiled import add_compensated, values_and_memory
from gradwire.kernels.cpu.bitmap import bitmap_decode, bitmap_encode
from gradwire.kernels.cpu.checksum import checksums
from gradwire.kernels.cpu.dynamic import dynamic_decode, dynamic_encode
from gradwire.kernels.cpu.elias_fano import elias_fano_decode, elias_fano_encode
from gradwire.kernels.cpu.exponent import exponent_decode, exponent_encode
from gradwire.kernels.cpu.gaps import gaps_decode, gaps_encode
from gradwire.kernels.cpu.inceptionn import inceptionn_decode, inceptionn_encode
from gradwire.kernels.cpu.integer import integer_decode, integer_encode, integer_scales
from gradwire.kernels.cpu.lowrank import project_columns, project_rows, write_product
from gradwire.kernels.cpu.merge import merge_top, survivors
from gradwire.kernels.cpu.narrow import narrow
from gradwire.kernels.cpu.power_of_two import power_of_two_decode, power_of_two_encode
from gradwire.kernels.cpu.quantile import quantile_decode, quantile_encode
from gradwire.kernels.cpu.rotation import rotated_decode, rotated_encode, rotated_scales, rotated_sums
from gradwire.kernels.cpu.senders import scatter_mean
from gradwire.kernels.cpu.sign import sign_decode, sign_encode
from gradwire.kernels.cpu.sketch import sketch, sketch_estimates
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
    inceptionn_payload_bytes,
    power_of_two_payload_bytes,
    quantile_payload_bytes,
    sign_payload_bytes,
    stochastic_payload_bytes,
    trits_payload_bytes,
    two_means_payload_bytes,
)
from gradwire.layout import Block

__all__ = [
    "accumulate",
    "bitmap_decode",
    "bitmap_encode",
    "checksums",
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
    "gaps_decode",
    "gaps_encode",
    "gather",
    "inceptionn_decode",
    "inceptionn_encode",
    "inceptionn_payload_bytes",
    "integer_decode",
    "integer_encode",
    "integer_scales",
    "magnitude_statistics",
    "merge_top",
    "narrow",
    "power_of_two_decode",
    "power_of_two_encode",
    "power_of_two_payload_bytes",
    "project_columns",
    "project_rows",
    "quantile_decode",
    "quantile_encode",
    "quantile_payload_bytes",
    "randomk_positions",
    "rotated_decode",
    "rotated_encode",
    "rotated_scales",
    "rotated_sums",
    "scatter",
    "scatter_mean",
    "scatter_sum",
    "sign_counts",
    "sign_decode",
    "sign_encode",
    "sign_payload_bytes",
    "sketch",
    "sketch_estimates",
    "stochastic_decode",
    "stochastic_encode",
    "stochastic_payload_bytes",
    "subtract",
    "survivors",
    "ternary_encode",
    "three_level_encode",
    "topk_select",
    "trits_decode",
    "trits_payload_bytes",
    "two_means_decode",
    "two_means_encode",
    "two_means_payload_bytes",
    "vote_encode",
    "write_product",
    "zero_runs_decode",
    "zero_runs_encode",
]


def accumulate(block: Block, gradient: Tensor, residual: Tensor, beta: float, gamma: float) -> bool:
    """See :meth:`gradwire.kernels.Kernels.accumulate`."""
    values, memory, _ = values_and_memory(gradient, residual)
    return bool(add_compensated(block.runs, values, memory, np.float32(beta), np.float32(gamma)))
