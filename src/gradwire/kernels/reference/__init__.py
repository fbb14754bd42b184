"""The kernels in plain torch, on any device: readable, slow, and the specification of every bit.

Payload formats, version 1. All numbers are little-endian; ``P`` is ``block.positions`` and ``S`` the number of
segments; every payload is padded with zeros to a multiple of 4 bytes.

**Sign.** ``S`` float32 scales, then ``P`` bits: bit ``p % 8`` of byte ``p // 8`` is set where position ``p`` is
negative. Bits of alignment gaps are 0. A segment with a value that is not finite has scale NaN and bits 0.

**Stochastic.** One float32 scale a bucket, then ``P`` codes of ``bits`` bits: code ``p % m`` of byte ``p // m``, with
``m = 8 // bits``, lowest bits first. Buckets restart at each run; the last one of a run may be shorter. With ``bucket``
0 a segment is one bucket. A code is ``level + s`` with ``s = 2**(bits - 1) - 1`` and stands for
``level * (scale / s)``; a larger code than ``2 * s`` reads as ``2 * s``. Codes of alignment gaps are 0. A bucket with a
value that is not finite has scale NaN and codes 0; one whose scale is below ``SMALLEST_SCALE`` has scale 0.

**Elias-Fano.** With ``l = min(32, max(0, floor(log2(universe / count))))``: the low ``l`` bits of each of the ``count``
positions, packed, padded to 4 bytes; then ``count + (universe - 1 >> l)`` bits, padded to 4 bytes, of which number
``(position >> l) + j`` is set for the ``j``-th position. With ``count`` 0 there are no bytes.
"""

from __future__ import annotations

from gradwire.kernels.reference.elias_fano import elias_fano_bytes, elias_fano_decode, elias_fano_encode
from gradwire.kernels.reference.lowrank import project_columns, project_rows, write_product
from gradwire.kernels.reference.memory import accumulate
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
from gradwire.kernels.reference.threshold import (
    collect_local_maxima,
    collect_reaching,
    collect_unambiguous,
    exceedances,
    magnitude_statistics,
)

FORMAT_VERSION = 1
"""Changes whenever the bytes of a payload would mean something else."""

__all__ = [
    "FORMAT_VERSION",
    "accumulate",
    "collect_local_maxima",
    "collect_reaching",
    "collect_unambiguous",
    "elias_fano_bytes",
    "elias_fano_decode",
    "elias_fano_encode",
    "exceedances",
    "gather",
    "magnitude_statistics",
    "project_columns",
    "project_rows",
    "randomk_positions",
    "scatter",
    "scatter_sum",
    "sign_decode",
    "sign_encode",
    "sign_payload_bytes",
    "stochastic_decode",
    "stochastic_encode",
    "stochastic_payload_bytes",
    "subtract",
    "topk_select",
    "write_product",
]
