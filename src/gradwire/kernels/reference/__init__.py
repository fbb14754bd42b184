"""The kernels in plain torch, on any device: readable, slow, and the specification of every bit.

What they write is described byte by byte in ``docs/formats.md``.
"""

from __future__ import annotations

from gradwire.kernels.reference.bitmap import bitmap_decode, bitmap_encode
from gradwire.kernels.reference.centroids import centroids_decode, centroids_encode
from gradwire.kernels.reference.checksum import checksums
from gradwire.kernels.reference.deadzone import (
    deadzone_decode,
    deadzone_encode,
    deadzone_payload_bytes,
    deadzone_room,
    deadzone_scales,
    deadzone_tile,
)
from gradwire.kernels.reference.deadzone_step import deadzone_dither, deadzone_sample, deadzone_step
from gradwire.kernels.reference.elias_fano import elias_fano_bytes, elias_fano_decode, elias_fano_encode
from gradwire.kernels.reference.gaps import gaps_decode, gaps_encode, gaps_low_bytes
from gradwire.kernels.reference.inceptionn import inceptionn_decode, inceptionn_encode, inceptionn_payload_bytes
from gradwire.kernels.reference.integer import euclidean_norms, integer_decode, integer_encode, integer_scales
from gradwire.kernels.reference.lowrank import project_columns, project_rows, write_product
from gradwire.kernels.reference.memory import accumulate
from gradwire.kernels.reference.merge import merge_top, survivors
from gradwire.kernels.reference.narrow import narrow
from gradwire.kernels.reference.orthonormal import orthonormalise
from gradwire.kernels.reference.quantile import quantile_decode, quantile_encode
from gradwire.kernels.reference.quantise import decode, encode
from gradwire.kernels.reference.rotation import hadamard, rotated_decode, rotated_encode, rotated_scales, rotated_sums
from gradwire.kernels.reference.sketch import sketch, sketch_estimates
from gradwire.kernels.reference.sparse import (
    gather,
    randomk_positions,
    scatter,
    scatter_mean,
    scatter_sum,
    subtract,
    topk_select,
)
from gradwire.kernels.reference.statistics import exceedances, magnitude_statistics, sign_counts
from gradwire.kernels.reference.subspace import add_product, combine_rows, split_rows
from gradwire.kernels.reference.threshold import (
    collect_drawn,
    collect_local_maxima,
    collect_reaching,
    collect_unambiguous,
)
from gradwire.kernels.reference.zero_runs import zero_runs_decode, zero_runs_encode
