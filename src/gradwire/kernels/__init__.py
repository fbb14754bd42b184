"""The inner loops: ``reference`` is the specification in plain torch, ``cpu`` the same bits in Numba.

A kernel is a function of the reference. Called from here it runs what the device of its tensors has under that name,
and the reference where that has nothing: a new device writes only what is hot. Payload formats are documented with the
reference. Tensors are contiguous; values float32, payloads uint8, positions int64. No kernel leaves its buffers: tests
run every method between memory pages that cannot be touched.

Every encoder first forms the compensated values ``t`` of its block:

* without a residual, ``t = gradient``;
* with one, ``t = beta * residual + gamma * gradient``, and the encoder leaves ``t - sent`` in ``residual``.

A value ``t[i]`` that is not finite never enters the residual: there the residual stays as it was, the payload of that
segment is marked so that every decoder returns NaN for it, and nothing of the segment counts as sent.
"""

from __future__ import annotations

from gradwire.kernels import codes as codes
from gradwire.kernels import reference
from gradwire.kernels.code import Code as Code
from gradwire.kernels.code import payload_bytes as payload_bytes
from gradwire.kernels.compensated import Compensated as Compensated
from gradwire.kernels.dispatch import at_once as at_once
from gradwire.kernels.dispatch import by_device
from gradwire.kernels.dispatch import by_reference as by_reference
from gradwire.kernels.dispatch import for_each as for_each
from gradwire.kernels.dispatch import shortcoming as shortcoming
from gradwire.kernels.places import Places as Places

accumulate = by_device(reference.accumulate)
add_product = by_device(reference.add_product)
bitmap_decode = by_device(reference.bitmap_decode)
bitmap_encode = by_device(reference.bitmap_encode)
centroids_decode = by_device(reference.centroids_decode)
centroids_encode = by_device(reference.centroids_encode)
checksums = by_device(reference.checksums)
collect_local_maxima = by_device(reference.collect_local_maxima)
collect_drawn = by_device(reference.collect_drawn)
collect_reaching = by_device(reference.collect_reaching)
collect_unambiguous = by_device(reference.collect_unambiguous)
combine_rows = by_device(reference.combine_rows)
deadzone_decode = by_device(reference.deadzone_decode)
deadzone_dither = by_device(reference.deadzone_dither)
deadzone_encode = by_device(reference.deadzone_encode)
deadzone_sample = by_device(reference.deadzone_sample)
deadzone_scales = by_device(reference.deadzone_scales)
deadzone_step = by_device(reference.deadzone_step)
decode = by_device(reference.decode)
elias_fano_decode = by_device(reference.elias_fano_decode)
elias_fano_encode = by_device(reference.elias_fano_encode)
encode = by_device(reference.encode)
euclidean_norms = by_device(reference.euclidean_norms)
exceedances = by_device(reference.exceedances)
gaps_decode = by_device(reference.gaps_decode)
gaps_encode = by_device(reference.gaps_encode)
gather = by_device(reference.gather)
hadamard = by_device(reference.hadamard)
inceptionn_decode = by_device(reference.inceptionn_decode)
inceptionn_encode = by_device(reference.inceptionn_encode)
integer_decode = by_device(reference.integer_decode)
integer_encode = by_device(reference.integer_encode)
integer_scales = by_device(reference.integer_scales)
magnitude_statistics = by_device(reference.magnitude_statistics)
merge_top = by_device(reference.merge_top)
narrow = by_device(reference.narrow)
orthonormalise = by_device(reference.orthonormalise)
project_columns = by_device(reference.project_columns)
project_rows = by_device(reference.project_rows)
quantile_decode = by_device(reference.quantile_decode)
quantile_encode = by_device(reference.quantile_encode)
randomk_positions = by_device(reference.randomk_positions)
rotated_decode = by_device(reference.rotated_decode)
rotated_encode = by_device(reference.rotated_encode)
rotated_scales = by_device(reference.rotated_scales)
rotated_sums = by_device(reference.rotated_sums)
scatter = by_device(reference.scatter)
scatter_mean = by_device(reference.scatter_mean)
scatter_sum = by_device(reference.scatter_sum)
sign_counts = by_device(reference.sign_counts)
sketch = by_device(reference.sketch)
sketch_estimates = by_device(reference.sketch_estimates)
split_rows = by_device(reference.split_rows)
subtract = by_device(reference.subtract)
survivors = by_device(reference.survivors)
topk_select = by_device(reference.topk_select)
write_product = by_device(reference.write_product)
zero_runs_decode = by_device(reference.zero_runs_decode)
zero_runs_encode = by_device(reference.zero_runs_encode)
