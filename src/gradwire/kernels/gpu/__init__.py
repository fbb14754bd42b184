"""The kernels in Triton, for CUDA and ROCm: the bits of the reference, without the host ever waiting for the device.

What is not here the reference does. Nothing of it is imported before a tensor of such a device comes; without Triton
the reference does everything.
"""

from __future__ import annotations

from importlib import import_module

from gradwire.kernels import codes
from gradwire.kernels.gpu.checksum import checksums
from gradwire.kernels.gpu.deadzone import deadzone_dither, deadzone_sample, deadzone_scales
from gradwire.kernels.gpu.deadzone_read import deadzone_decode
from gradwire.kernels.gpu.deadzone_write import deadzone_encode
from gradwire.kernels.gpu.elias_fano import elias_fano_decode, elias_fano_encode
from gradwire.kernels.gpu.integer import euclidean_norms, integer_decode, integer_encode, integer_scales
from gradwire.kernels.gpu.lowrank import (
    project_columns,
    project_columns_each,
    project_rows,
    project_rows_each,
    remember_factors,
    write_product,
    write_products,
)
from gradwire.kernels.gpu.memory import accumulate
from gradwire.kernels.gpu.narrow import narrow
from gradwire.kernels.gpu.orthonormal import orthonormalise, orthonormalise_each, refill_each, scale_each
from gradwire.kernels.gpu.quantise import CODES, decode, decode_each, encode, encode_each
from gradwire.kernels.gpu.sparse import gather, randomk_positions, scatter, scatter_sum, subtract
from gradwire.kernels.gpu.subspace import (
    add_product,
    add_products,
    combine_rows,
    combine_rows_each,
    split_rows,
    split_rows_each,
    weights_each,
)
from gradwire.kernels.gpu.topk import topk_select

for _code in codes.ALL:  # which its module of the same name here adds to CODES
    import_module(f"{__name__}.{_code.__module__.rpartition('.')[-1]}")
