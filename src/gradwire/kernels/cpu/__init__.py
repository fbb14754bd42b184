"""The kernels in Numba, without the interpreter lock: the bits of the reference, at memory speed, on torch's threads.

Every function is compiled on its first call, once, or read from a cache on disk; an attachment rehearses its method, so
that nothing is left to compile within a training step.
"""

from __future__ import annotations

from importlib import import_module

from gradwire.kernels import codes
from gradwire.kernels.cpu._stages import CODES
from gradwire.kernels.cpu.bitmap import bitmap_decode, bitmap_encode
from gradwire.kernels.cpu.centroids import centroids_decode, centroids_encode
from gradwire.kernels.cpu.checksum import checksums
from gradwire.kernels.cpu.deadzone import deadzone_dither, deadzone_encode, deadzone_scales
from gradwire.kernels.cpu.deadzone_decode import deadzone_decode
from gradwire.kernels.cpu.deadzone_step import deadzone_sample, deadzone_step
from gradwire.kernels.cpu.elias_fano import elias_fano_decode, elias_fano_encode
from gradwire.kernels.cpu.gaps import gaps_decode, gaps_encode
from gradwire.kernels.cpu.inceptionn import inceptionn_encode
from gradwire.kernels.cpu.inceptionn_decode import inceptionn_decode
from gradwire.kernels.cpu.integer import euclidean_norms, integer_decode, integer_encode, integer_scales
from gradwire.kernels.cpu.lowrank import project_columns, project_rows, write_product
from gradwire.kernels.cpu.memory import accumulate
from gradwire.kernels.cpu.merge import merge_top, survivors
from gradwire.kernels.cpu.narrow import narrow
from gradwire.kernels.cpu.orthonormal import orthonormalise
from gradwire.kernels.cpu.quantile import quantile_encode
from gradwire.kernels.cpu.quantile_decode import quantile_decode
from gradwire.kernels.cpu.quantise import decode, encode
from gradwire.kernels.cpu.rotation import hadamard, rotated_decode, rotated_encode, rotated_scales, rotated_sums
from gradwire.kernels.cpu.sketch import sketch, sketch_estimates
from gradwire.kernels.cpu.sparse import gather, randomk_positions, scatter, scatter_mean, scatter_sum, subtract
from gradwire.kernels.cpu.statistics import exceedances, magnitude_statistics, sign_counts
from gradwire.kernels.cpu.subspace import (
    add_product,
    add_products,
    combine_rows,
    combine_rows_each,
    split_rows,
    split_rows_each,
)
from gradwire.kernels.cpu.threshold import collect_drawn, collect_local_maxima, collect_reaching, collect_unambiguous
from gradwire.kernels.cpu.topk import topk_select
from gradwire.kernels.cpu.zero_runs import zero_runs_decode, zero_runs_encode

for _code in codes.ALL:  # which its module of the same name here adds to CODES
    import_module(f"{__name__}.{_code.__module__.rpartition('.')[-1]}")
