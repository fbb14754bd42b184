"""The kernels in plain torch, on any device: readable, slow, and the specification of every bit.

Payload formats, version 1. All numbers are little-endian; ``P`` is ``block.positions`` and ``S`` the number of
segments; every payload is padded with zeros to a multiple of 4 bytes.

**Sign.** ``S`` float32 scales, then ``P`` bits: bit ``p % 8`` of byte ``p // 8`` is set where position ``p`` is
negative. Bits of alignment gaps are 0. A segment with a value that is not finite has scale NaN and bits 0.

**Vote.** As sign, with scales 1.

**One bit.** For each segment two float32, the mean of its other values and the mean of its negative ones, 0 where
there are none; then ``P`` bits as in sign. A segment with a value that is not finite has means NaN and bits 0.

**QSGD.** ``S`` float32 scales, then ``P`` codes of ``bits`` bits: code ``p % m`` of byte ``p // m``, with
``m = 8 // bits``, lowest bits first. A code is ``level + s`` with ``s = 2**(bits - 1) - 1`` and stands for
``level * (scale / s)``; a larger code than ``2 * s`` reads as ``2 * s``. Codes of alignment gaps are 0. A segment with
a value that is not finite has scale NaN and codes 0; one whose scale is below ``SMALLEST_SCALE`` has scale 0.

**NUQSGD.** As QSGD; a code is ``number + negative * 2**(bits - 1)``, and number ``i`` of ``m = 2**(bits - 1) - 1``
stands for ``2**(i - m)`` times the scale, or for 0 if it is 0.

**Quantile.** With a sketch, 4 bytes: the low half of the key, ``h``. Then ``min(numel, buckets)`` float32 means for
each segment: those of its negative values first, each side by magnitude. Without a sketch follow ``P`` codes of
``log2(buckets)`` bits, packed as above, codes of gaps 0: the number of each position's mean within its segment. With
one, ``P`` bits, set where negative; then for each segment ``rows`` rows of ``ceil(numel * columns)`` cells of
``log2(buckets)`` bits, zeros up to a multiple of 8 cells. A cell is the smallest number, counted on its side of zero,
of the values hashed there, or all ones for none. Value ``j`` of a segment is hashed in row ``r`` to column
``hash32(mix64(h + r), j) * columns >> 32`` and reads as the largest number in its cells. Numbers too large read as the
largest there is. All means of a segment with a value that is not finite are NaN.

**INCEPTIONN.** An int32 ``m``, how often the error bound ``2**-b`` is doubled, and an int32, how many words of 4 bytes
the values would have taken without; ``S`` bits, set where a value of the segment is not finite, padded to 4 bytes;
``P`` tags of 2 bits, packed as above, padded to 4 bytes; the bytes of the values in order of position, little-endian;
and at least 4 zeros, as many as the payload's size leaves over. A tag is the number of edges that the exponent of a
value reaches, of ``low = 127 - b + m``, ``middle = low + min((b + 1) // 2, 7)`` and ``top = low + min(b, 15)``. With
tag 0 a value takes no bytes and is 0. With tag 1 it takes one: ``floor(|t| / 2**(middle - 134))`` in 7 bits, its sign
above them. With tag 2 it takes two: ``floor(|t| / 2**(top - 142))`` in 15 bits, and its sign. With tag 3 it is a
float32. Tags of gaps, and of segments with a value that is not finite, are 0.

**Gaps.** The distance of each position from the one before, from -1 for the first. A distance of ``b`` bits is a class,
a byte: ``2 * (b - 1)`` plus the bit after the highest, or plus 1 if ``b`` is 1; and its ``max(b - 2, 0)`` other bits,
which are packed one after the other, lowest first.

**Bitmap.** Bit ``p % 8`` of byte ``p // 8`` is set where position ``p`` was sent.
**Integer.** ``P`` codes of ``bits`` bits, packed as above, added over workers as bytes: a code is ``level + s`` with
``s`` levels on each side of zero and ``2 * s * n < 2**bits`` for ``n`` workers, so that no sum carries over. The sum of
codes less ``n * s`` counts steps of ``scale / s``; scales travel apart, reduced to their maximum. Codes of alignment
gaps, and of segments whose scale is not finite, are 0.
**Trits.** ``S`` float32 scales, then ``M`` bytes, ``P / 5`` rounded up to a multiple of 8, of five digits in base 3:
position ``p`` is digit ``p // M`` (0 is the lowest) of byte ``p % M``. A digit stands for ``(digit - 1) * scale``.
Bytes are read modulo 243. Digits of alignment gaps and beyond ``P`` are 0. A segment with a value that is not finite
has scale NaN and digits 0.

**Zero runs.** Packed trits in which a run of 2 to 14 bytes 121 (five zeros) is one byte, 241 plus its length; longer
runs are cut into runs of 14 first. Other bytes stay. Where they end before the trits do, five zeros follow each.

**Natural, 9 bits.** ``P`` bytes, the exponent field of a float32 each, then ``P`` bits as in sign. The fraction
is 0, so field 0 stands for 0; field 255 reads as NaN. Fields of alignment gaps are 0. All fields of a segment with a
value that is not finite are 255, its bits 0.

**Natural, 8 bits.** ``S`` float32 units, powers of two, then ``P`` bytes: bit 7 is set where negative, the other
bits are the exponent field of a float32 that is multiplied with the unit. Bytes of alignment gaps are 0. A segment with
a value that is not finite has unit NaN and bytes 0.

**Dynamic.** ``S`` float32 scales, then ``P`` bytes: bit 7 is set where negative, the other bits are the number of an
entry of ``dynamic.magnitudes``, which is multiplied with the scale. Bytes of alignment gaps are 0. A segment with a
value that is not finite has scale NaN and bytes 0; one whose scale is below ``SMALLEST_SCALE`` has scale 0.

**Exponent.** ``S`` float32 scales, powers of two, then ``P`` codes of 4 bits as for QSGD: ``distance + 8 *
negative`` stands for ``2**-distance * scale``, or 0 for distance 7. Codes of alignment gaps are 0. A segment with a
value that is not finite has scale NaN and codes 0; one whose values are all denormal has scale 0.
**Rotated.** ``P`` codes of 4 bits, two a byte, lowest bits first; each names an integer of a table of 16. Pieces of a
block are numbered as in :class:`gradwire.transform.Rotation`; a piece whose scale is 0 or not finite has codes 0. Sums
of integers have one byte each, or two.

**Elias-Fano.** With ``l = min(32, max(0, floor(log2(universe / count))))``: the low ``l`` bits of each of the ``count``
positions, packed, padded to 4 bytes; then ``count + (universe - 1 >> l)`` bits, padded to 4 bytes, of which number
``(position >> l) + j`` is set for the ``j``-th position. With ``count`` 0 there are no bytes.
"""

from __future__ import annotations

from gradwire.kernels.reference.bitmap import bitmap_decode, bitmap_encode
from gradwire.kernels.reference.checksum import checksums
from gradwire.kernels.reference.elias_fano import elias_fano_bytes, elias_fano_decode, elias_fano_encode
from gradwire.kernels.reference.gaps import gaps_decode, gaps_encode, gaps_low_bytes
from gradwire.kernels.reference.inceptionn import inceptionn_decode, inceptionn_encode, inceptionn_payload_bytes
from gradwire.kernels.reference.integer import integer_decode, integer_encode, integer_scales
from gradwire.kernels.reference.lowrank import project_columns, project_rows, write_product
from gradwire.kernels.reference.memory import accumulate
from gradwire.kernels.reference.merge import merge_top, survivors
from gradwire.kernels.reference.narrow import narrow
from gradwire.kernels.reference.quantile import quantile_decode, quantile_encode, quantile_payload_bytes
from gradwire.kernels.reference.quantise import decode, encode
from gradwire.kernels.reference.rotation import rotated_decode, rotated_encode, rotated_scales, rotated_sums
from gradwire.kernels.reference.senders import scatter_mean
from gradwire.kernels.reference.sketch import sketch, sketch_estimates
from gradwire.kernels.reference.sparse import (
    gather,
    randomk_positions,
    scatter,
    scatter_sum,
    subtract,
    topk_select,
)
from gradwire.kernels.reference.statistics import exceedances, magnitude_statistics, sign_counts
from gradwire.kernels.reference.threshold import collect_local_maxima, collect_reaching, collect_unambiguous
from gradwire.kernels.reference.zero_runs import zero_runs_decode, zero_runs_encode

FORMAT_VERSION = 1
"""Changes whenever the bytes of a payload would mean something else."""
