"""The kernels in plain torch, on any device: readable, slow, and the specification of every bit.

Payload formats, version 1. All numbers are little-endian; ``P`` is ``block.positions`` and ``S`` the number of
segments; every payload is padded with zeros to a multiple of 4 bytes.

**Sign.** ``S`` float32 scales, then ``P`` bits: bit ``p % 8`` of byte ``p // 8`` is set where position ``p`` is
negative. Bits of alignment gaps are 0. A segment with a value that is not finite has scale NaN and bits 0.

**Vote.** As sign, with scales 1.

**Two means.** For each segment two float32, the mean of its other values and the mean of its negative ones, 0 where
there are none; then ``P`` bits as in sign. A segment with a value that is not finite has means NaN and bits 0.

**Stochastic.** One float32 scale a bucket, then ``P`` codes of ``bits`` bits: code ``p % m`` of byte ``p // m``, with
``m = 8 // bits``, lowest bits first. Buckets restart at each run; the last one of a run may be shorter. With ``bucket``
0 a segment is one bucket. A code is ``level + s`` with ``s = 2**(bits - 1) - 1`` and stands for
``level * (scale / s)``; a larger code than ``2 * s`` reads as ``2 * s``. Codes of alignment gaps are 0. A bucket with a
value that is not finite has scale NaN and codes 0; one whose scale is below ``SMALLEST_SCALE`` has scale 0.

**Trits.** ``S`` float32 scales, then ``M`` bytes, ``P / 5`` rounded up to a multiple of 8, of five digits in base 3:
position ``p`` is digit ``p // M`` (0 is the lowest) of byte ``p % M``. A digit stands for ``(digit - 1) * scale``.
Bytes are read modulo 243. Digits of alignment gaps and beyond ``P`` are 0. A segment with a value that is not finite
has scale NaN and digits 0.

**Zero runs.** Packed trits in which a run of 2 to 14 bytes 121 (five zeros) is one byte, 241 plus its length; longer
runs are cut into runs of 14 first. Other bytes stay.

**Powers of two, 9 bits.** ``P`` bytes, the exponent field of a float32 each, then ``P`` bits as in sign. The fraction
is 0, so field 0 stands for 0; field 255 reads as NaN. Fields of alignment gaps are 0. All fields of a segment with a
value that is not finite are 255, its bits 0.

**Powers of two, 8 bits.** ``S`` float32 units, powers of two, then ``P`` bytes: bit 7 is set where negative, the other
bits are the exponent field of a float32 that is multiplied with the unit. Bytes of alignment gaps are 0. A segment with
a value that is not finite has unit NaN and bytes 0.

**Dynamic.** ``S`` float32 scales, then ``P`` bytes: bit 7 is set where negative, the other bits are the number of an
entry of ``dynamic.magnitudes``, which is multiplied with the scale. Bytes of alignment gaps are 0. A segment with a
value that is not finite has scale NaN and bytes 0; one whose scale is below ``SMALLEST_SCALE`` has scale 0.

**Exponent.** ``S`` float32 scales, powers of two, then ``P`` codes of 4 bits as for stochastic: ``distance + 8 *
negative`` stands for ``2**-distance * scale``, or 0 for distance 7. Codes of alignment gaps are 0. A segment with a
value that is not finite has scale NaN and codes 0; one whose values are all denormal has scale 0.

**Quantile.** For each segment ``2**bits`` float32, the means of its buckets, 0 where empty; then ``P`` codes of
``bits`` bits as for stochastic: the number of the bucket. Codes of alignment gaps are 0. A segment with a value that is
not finite has means NaN and codes 0.

**INCEPTIONN.** For ``n`` values and an error bound ``2**-b``: ``n`` tags of 2 bits, lowest bits first, padded to 4
bytes; then the values of tag 3, 32 bits each, those of tag 2, 16 bits each, and those of tag 1, 8 bits each, each in
order, padded to 4 bytes. Tag 3 is for magnitudes of 1 and more and for NaN, tag 2 down to ``2**-(b // 2)``, tag 1 down
to ``2**-b``, tag 0 for the rest, which reads as 0. Tag 3 is the float32 itself; the others are cut to a sign in the
highest bit above a whole number of ``2**-15`` (tag 2) or ``2**-(b // 2 + 7)`` (tag 1).

**Elias-Fano.** With ``l = min(32, max(0, floor(log2(universe / count))))``: the low ``l`` bits of each of the ``count``
positions, packed, padded to 4 bytes; then ``count + (universe - 1 >> l)`` bits, padded to 4 bytes, of which number
``(position >> l) + j`` is set for the ``j``-th position. With ``count`` 0 there are no bytes.
"""

from __future__ import annotations

from gradwire.kernels.reference.dynamic import dynamic_decode, dynamic_encode, dynamic_payload_bytes
from gradwire.kernels.reference.elias_fano import elias_fano_bytes, elias_fano_decode, elias_fano_encode
from gradwire.kernels.reference.exponent import exponent_decode, exponent_encode, exponent_payload_bytes
from gradwire.kernels.reference.inceptionn import inceptionn_bytes, inceptionn_decode, inceptionn_encode
from gradwire.kernels.reference.lowrank import project_columns, project_rows, write_product
from gradwire.kernels.reference.memory import accumulate
from gradwire.kernels.reference.power_of_two import (
    power_of_two_decode,
    power_of_two_encode,
    power_of_two_payload_bytes,
)
from gradwire.kernels.reference.quantile import quantile_decode, quantile_encode, quantile_payload_bytes
from gradwire.kernels.reference.sign import sign_decode, sign_encode, sign_payload_bytes
from gradwire.kernels.reference.sparse import (
    gather,
    randomk_positions,
    scatter,
    scatter_sum,
    subtract,
    topk_select,
)
from gradwire.kernels.reference.stochastic import stochastic_decode, stochastic_encode, stochastic_payload_bytes
from gradwire.kernels.reference.ternary import ternary_encode
from gradwire.kernels.reference.three_level import three_level_encode
from gradwire.kernels.reference.threshold import (
    collect_local_maxima,
    collect_reaching,
    collect_unambiguous,
    exceedances,
    magnitude_statistics,
    sign_counts,
)
from gradwire.kernels.reference.trits import trits_decode, trits_payload_bytes
from gradwire.kernels.reference.two_means import two_means_decode, two_means_encode, two_means_payload_bytes
from gradwire.kernels.reference.vote import vote_encode
from gradwire.kernels.reference.zero_runs import zero_runs_decode, zero_runs_encode

FORMAT_VERSION = 1
"""Changes whenever the bytes of a payload would mean something else."""

__all__ = [
    "FORMAT_VERSION",
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
    "write_product",
    "zero_runs_decode",
    "zero_runs_encode",
]
