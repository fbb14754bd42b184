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

import math

import torch
from torch import Tensor

from gradwire.errors import PayloadError
from gradwire.layout import Block, Int64Array
from gradwire.randomness import hash32, mix64, run_keys

FORMAT_VERSION = 1
"""Changes whenever the bytes of a payload would mean something else."""

CHUNK = 4096
"""Elements of a run that are added up before the sum goes on to the segment's total."""

LANES = 32
"""Interleaved partial sums within a chunk."""

SMALLEST_SCALE = 2.0**-118
"""A bucket with a smaller norm is sent as zeros: dividing by it would overflow."""

LARGEST_SCALE = (2 - 2.0**-21) * 2.0**127
"""A larger scale counts as this one: decoding the highest level would overflow."""

FEISTEL_ROUNDS = 6


def _flat_runs(block: Block, segment: int) -> list[tuple[int, int, int, int]]:
    """Number, start, one past the last element, and position of each run of a segment."""
    first, last = block.segments[segment : segment + 2].tolist()
    return [
        (run, start, start + length, position)
        for run, (start, length, position) in enumerate(block.runs[first:last].tolist(), first)
    ]


def _compensated(gradient: Tensor, residual: Tensor | None, beta: float, gamma: float) -> Tensor:
    """``t``, each product and the sum rounded to float32."""
    return gradient.clone() if residual is None else residual * beta + gradient * gamma


def _keep(residual: Tensor | None, values: Tensor) -> None:
    """Leaves the finite ``values`` in the residual."""
    if residual is not None:
        residual.copy_(torch.where(values.isfinite(), values, residual))


def _total(values: Tensor) -> float:
    """Sum of one run of float64 in a defined order that vectorises.

    Element ``i`` of a chunk goes to lane ``i % LANES``, in order; lanes are added pairwise, the upper half to the lower
    half, until one is left; chunks are added in order.
    """
    chunks = -(-values.numel() // CHUNK)
    rows = torch.nn.functional.pad(values, (0, chunks * CHUNK - values.numel())).view(chunks, -1, LANES)
    lanes = torch.zeros(chunks, LANES, dtype=torch.float64, device=values.device)
    for row in rows.unbind(1):
        lanes += row
    while lanes.shape[1] > 1:
        low, high = lanes.chunk(2, dim=1)
        lanes = low + high
    total = 0.0
    for chunk in lanes.flatten().tolist():
        total += chunk
    return total


def _as_bytes(values: Tensor) -> Tensor:
    """The bytes of a tensor, as a flat view."""
    return values.contiguous().view(torch.uint8).flatten()


def _padded(size: int) -> int:
    """The next multiple of 4 bytes."""
    return -(-size // 4) * 4


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Packs codes of ``bits`` bits into bytes, lowest bits first."""
    groups = codes.view(-1, 8 // bits).to(torch.int32)
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device)
    packed: Tensor = (groups << shifts).sum(1).to(torch.uint8)
    return packed


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Inverse of :func:`_pack`, as int32."""
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=packed.device)
    codes: Tensor = (packed.to(torch.int32)[:, None] >> shifts) & (2**bits - 1)
    return codes.flatten()


def accumulate(block: Block, gradient: Tensor, residual: Tensor, beta: float, gamma: float) -> bool:
    """See :meth:`gradwire.kernels.Kernels.accumulate`."""
    finite = True
    for start, length, _ in block.runs.tolist():
        kept = residual[start : start + length]
        values = _compensated(gradient[start : start + length], kept, beta, gamma)
        finite = finite and bool(values.isfinite().all())
        _keep(kept, values)
    return finite


def sign_payload_bytes(block: Block) -> int:
    """See :meth:`gradwire.kernels.Kernels.sign_payload_bytes`."""
    return _padded(4 * block.segment_count + block.positions // 8)


def sign_encode(
    block: Block, gradient: Tensor, residual: Tensor | None, beta: float, gamma: float, payload: Tensor
) -> None:
    """See :meth:`gradwire.kernels.Kernels.sign_encode`."""
    scales = torch.zeros(block.segment_count, device=gradient.device)
    negative = torch.zeros(block.positions, dtype=torch.uint8, device=gradient.device)
    for segment in range(block.segment_count):
        runs = _flat_runs(block, segment)
        kept = [None if residual is None else residual[start:stop] for _, start, stop, _ in runs]
        values = [
            _compensated(gradient[start:stop], old, beta, gamma)
            for (_, start, stop, _), old in zip(runs, kept, strict=True)
        ]
        total = 0.0
        for t in values:
            total += _total(t.double().abs())
        scales[segment] = scale = torch.tensor(total / int(block.segment_numels[segment]), dtype=torch.float32)
        for (_, start, stop, position), old, t in zip(runs, kept, values, strict=True):
            if scale.isfinite():
                negative[position : position + stop - start] = t < 0
                _keep(old, t - torch.where(t < 0, -scale, scale))
            else:
                scales[segment] = torch.nan
                _keep(old, t)
    packed = torch.cat((_as_bytes(scales), _pack(negative, 1)))
    payload.zero_()
    payload[: packed.numel()] = packed


def sign_decode(block: Block, payloads: Tensor, out: Tensor, weight: float) -> None:
    """See :meth:`gradwire.kernels.Kernels.sign_decode`."""
    head = 4 * block.segment_count
    scales = payloads[:, :head].contiguous().view(torch.float32)
    for segment in range(block.segment_count):
        for _, start, stop, position in _flat_runs(block, segment):
            first, last = head + position // 8, head + -(-(position + stop - start) // 8)
            rows = [
                torch.where(_unpack(payload[first:last], 1)[: stop - start] == 1, -scale, scale)
                for payload, scale in zip(payloads, scales[:, segment], strict=True)
            ]
            out[start:stop] = _sum_in_order(rows) * weight


def _sum_in_order(rows: list[Tensor]) -> Tensor:
    """``((row0 + row1) + row2) + ...`` in float32."""
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def _buckets(block: Block, bucket: int) -> list[list[tuple[int, int, int, int]]]:
    """The pieces (run, first element in the run, one past the last, position) of each bucket."""
    if not bucket:
        return [
            [(run, 0, stop - start, position) for run, start, stop, position in _flat_runs(block, segment)]
            for segment in range(block.segment_count)
        ]
    return [
        [(run, first, min(first + bucket, length), position + first)]
        for run, (_, length, position) in enumerate(block.runs.tolist())
        for first in range(0, length, bucket)
    ]


def stochastic_bucket_count(block: Block, bucket: int) -> int:
    """Number of scales in a stochastic payload."""
    return int((-(-block.runs[:, 1] // bucket)).sum()) if bucket else block.segment_count


def stochastic_payload_bytes(block: Block, bits: int, bucket: int) -> int:
    """See :meth:`gradwire.kernels.Kernels.stochastic_payload_bytes`."""
    return _padded(4 * stochastic_bucket_count(block, bucket) + block.positions * bits // 8)


def _step(scale: Tensor, levels: int) -> Tensor:
    """What one level is worth."""
    return scale.clamp(-LARGEST_SCALE, LARGEST_SCALE) / torch.full_like(scale, levels)


def stochastic_encode(
    block: Block,
    gradient: Tensor,
    residual: Tensor | None,
    beta: float,
    gamma: float,
    payload: Tensor,
    bits: int,
    bucket: int,
    euclidean: bool,
    key: int,
) -> None:
    """See :meth:`gradwire.kernels.Kernels.stochastic_encode`.

    The level of ``x = t / scale * s`` is ``floor(x + u)``, formed as ``floor(x + (s + u)) - s`` in float32, with ``u``
    the middle of one of ``2**16`` equal parts of [0, 1): level ``floor(x) + 1`` has the probability ``x - floor(x)``,
    rounded to 16 bits.
    """
    levels = 2 ** (bits - 1) - 1
    keys = run_keys(key, block.streams).tolist()
    buckets = _buckets(block, bucket)
    scales = torch.zeros(len(buckets), device=gradient.device)
    codes = torch.zeros(block.positions, dtype=torch.uint8, device=gradient.device)
    for number, pieces in enumerate(buckets):
        starts = [int(block.runs[run, 0]) + first for run, first, _, _ in pieces]
        stops = [int(block.runs[run, 0]) + last for run, _, last, _ in pieces]
        kept = [None if residual is None else residual[a:b] for a, b in zip(starts, stops, strict=True)]
        values = [_compensated(gradient[a:b], old, beta, gamma) for a, b, old in zip(starts, stops, kept, strict=True)]
        scales[number] = scale = _norm(values, euclidean)
        if scale.isnan():
            for t, old in zip(values, kept, strict=True):
                _keep(old, t)
            continue
        step = _step(scale, levels)
        inverse = torch.full_like(scale, levels) / scale if scale > 0 else torch.zeros_like(scale)
        for (run, first, last, position), t, old in zip(pieces, values, kept, strict=True):
            counters = torch.arange(first, last, device=gradient.device) + int(block.origins[run])
            uniform = ((hash32(keys[run], counters) >> 16).float() * 2.0**-16 + 2.0**-17) + levels
            code = (t * inverse + uniform).to(torch.int32).clamp(max=2 * levels)
            codes[position : position + last - first] = code.to(torch.uint8)
            _keep(old, t - (code - levels).float() * step)
    packed = torch.cat((_as_bytes(scales), _pack(codes, bits)))
    payload.zero_()
    payload[: packed.numel()] = packed


def _norm(values: list[Tensor], euclidean: bool) -> Tensor:
    """The scale of a bucket's pieces: NaN if any value is not finite, 0 if too small."""
    if not all(bool(t.isfinite().all()) for t in values):
        return values[0].new_tensor(torch.nan)
    if euclidean:
        total = 0.0
        for t in values:
            total += _total(t.double().square())
        norm = math.sqrt(total)
    else:
        norm = max(float(t.abs().max()) for t in values)
    return values[0].new_tensor(min(norm, LARGEST_SCALE) if norm >= SMALLEST_SCALE else 0.0)


def stochastic_decode(block: Block, payloads: Tensor, out: Tensor, weight: float, bits: int, bucket: int) -> None:
    """See :meth:`gradwire.kernels.Kernels.stochastic_decode`."""
    levels = 2 ** (bits - 1) - 1
    buckets = _buckets(block, bucket)
    head = 4 * len(buckets)
    steps = _step(payloads[:, :head].contiguous().view(torch.float32), levels)
    codes = [
        (_unpack(payload[head : head + block.positions * bits // 8], bits).clamp(max=2 * levels) - levels).float()
        for payload in payloads
    ]
    for number, pieces in enumerate(buckets):
        for run, first, last, position in pieces:
            start = int(block.runs[run, 0])
            rows = [
                code[position : position + last - first] * step
                for code, step in zip(codes, steps[:, number], strict=True)
            ]
            out[start + first : start + last] = _sum_in_order(rows) * weight


def topk_select(
    block: Block,
    gradient: Tensor,
    residual: Tensor | None,
    beta: float,
    gamma: float,
    counts: Int64Array,
    positions: Tensor,
    values: Tensor,
) -> None:
    """See :meth:`gradwire.kernels.Kernels.topk_select`. Of equal magnitudes the lowest position goes first.

    A segment with a value that is not finite selects its first positions, with values NaN.
    """
    written = 0
    for segment, count in enumerate(counts.tolist()):
        pieces, places = [], []
        for _, start, stop, position in _flat_runs(block, segment):
            kept = None if residual is None else residual[start:stop]
            pieces.append(_compensated(gradient[start:stop], kept, beta, gamma))
            places.append(torch.arange(position, position + stop - start, device=gradient.device))
            _keep(kept, pieces[-1])
        t, place = torch.cat(pieces), torch.cat(places)
        if t.isfinite().all():
            chosen = t.abs().sort(descending=True, stable=True).indices[:count].sort().values
        else:
            t = torch.full_like(t, torch.nan)
            chosen = torch.arange(count, device=t.device)
        positions[written : written + count] = place[chosen]
        values[written : written + count] = t[chosen]
        written += count


def randomk_positions(block: Block, counts: Int64Array, positions: Tensor, key: int) -> None:
    """See :meth:`gradwire.kernels.Kernels.randomk_positions`.

    Element ``j`` of the choice is ``permutation(j)``, a keyed Feistel network over the smallest power of two that is
    not below the segment's number of elements, applied again while it leads out of the segment. The key is that of the
    segment's first run, mixed with the run's origin. Positions come in the order of ``j``.
    """
    keys = run_keys(key, block.streams)
    written = 0
    for segment, count in enumerate(counts.tolist()):
        first = int(block.segments[segment])
        segment_key = mix64(int(keys[first]) ^ int(block.origins[first]))
        numel = int(block.segment_numels[segment])
        elements = torch.arange(count, device=positions.device)
        elements = _permuted(elements, numel, segment_key)
        while (outside := elements >= numel).any():
            elements[outside] = _permuted(elements[outside], numel, segment_key)
        places = torch.cat(
            [
                torch.arange(position, position + stop - start, device=positions.device)
                for _, start, stop, position in _flat_runs(block, segment)
            ]
        )
        positions[written : written + count] = places[elements]
        written += count


def _permuted(elements: Tensor, numel: int, key: int) -> Tensor:
    """A keyed permutation of the numbers below the power of two that is not below ``numel``.

    Halves of the number take turns: each is xored with a hash of the other, under a key of its own each round.
    """
    width = (numel - 1).bit_length()
    low_width = width // 2
    low_mask, high_mask = 2**low_width - 1, 2 ** (width - low_width) - 1
    low, high = elements & low_mask, elements >> low_width
    for _ in range(FEISTEL_ROUNDS // 2):
        key = mix64(key)
        high = high ^ hash32(key, low) & high_mask
        key = mix64(key)
        low = low ^ hash32(key, high) & low_mask
    permuted: Tensor = high << low_width | low
    return permuted


def _places(block: Block, positions: Tensor) -> Tensor:
    """The elements of the flat buffer at ``positions``.

    Raises:
        PayloadError: If a position lies in no run.
    """
    if not positions.numel():
        return positions
    runs = torch.from_numpy(block.runs).to(positions.device)
    if not len(runs):
        raise lies_in_no_run(block, int(positions[0]))
    run = torch.searchsorted(runs[:, 2].contiguous(), positions, right=True) - 1
    offset = positions - runs[:, 2][run]
    bad = (run < 0) | (offset >= runs[:, 1][run])
    if bad.any():
        raise lies_in_no_run(block, int(positions[bad][0]))
    return runs[:, 0][run] + offset


def lies_in_no_run(block: Block, position: int) -> PayloadError:
    """The error for a position that no encoder of the block can have chosen."""
    return PayloadError(
        f"position {position} lies in no run of the block: positions are below {block.positions} and not in the gaps "
        "that alignment leaves between runs; was it encoded with another configuration?"
    )


def gather(block: Block, source: Tensor, positions: Tensor, values: Tensor) -> None:
    """See :meth:`gradwire.kernels.Kernels.gather`."""
    values.copy_(source[_places(block, positions)])


def subtract(block: Block, residual: Tensor, positions: Tensor, values: Tensor) -> None:
    """See :meth:`gradwire.kernels.Kernels.subtract`. Positions are distinct."""
    places = _places(block, positions)
    residual[places] = torch.where(values.isfinite(), residual[places] - values, residual[places])


def scatter_sum(block: Block, positions: Tensor, values: Tensor, out: Tensor, weight: float) -> None:
    """See :meth:`gradwire.kernels.Kernels.scatter_sum`. The positions of a row are distinct.

    Raises:
        PayloadError: If a position lies in no run; nothing has been written then.
    """
    places = [_places(block, row) for row in positions]
    for start, length, _ in block.runs.tolist():
        out[start : start + length] = 0
    for place, row in zip(places, values, strict=True):
        out[place] = out[place] + row
    for start, length, _ in block.runs.tolist():
        out[start : start + length] *= weight


def elias_fano_bytes(count: int, universe: int) -> int:
    """See :meth:`gradwire.kernels.Kernels.elias_fano_bytes`."""
    if not count:
        return 0
    width = _elias_fano_low_width(count, universe)
    return 4 * (-(-count * width // 32) + -(-(count + (universe - 1 >> width)) // 32))


def elias_fano_layout(count: int, universe: int, size: int) -> tuple[int, int]:
    """How many low bits of each position are stored as they are, and in how many bytes all of them.

    Raises:
        PayloadError: If ``size`` is not the number of bytes that ``count`` positions take.
    """
    if size != elias_fano_bytes(count, universe):
        raise PayloadError(
            f"{count} positions below {universe} take {elias_fano_bytes(count, universe)} bytes, not {size}"
        )
    width = _elias_fano_low_width(count, universe)
    return width, 4 * -(-count * width // 32)


def _elias_fano_low_width(count: int, universe: int) -> int:
    return min(32, max(0, (universe // count).bit_length() - 1))


def elias_fano_encode(positions: Tensor, universe: int, payload: Tensor) -> None:
    """See :meth:`gradwire.kernels.Kernels.elias_fano_encode`.

    Raises:
        PayloadError: If positions are not ascending, distinct and below ``universe``.
    """
    count = positions.numel()
    if not count:
        return
    if int(positions[0]) < 0 or int(positions[-1]) >= universe or bool((positions.diff() <= 0).any()):
        raise PayloadError(f"positions to encode must be ascending, distinct and in [0, {universe})")
    width, boundary = elias_fano_layout(count, universe, payload.numel())
    shifts = torch.arange(width, device=positions.device)
    low = torch.zeros(8 * boundary, dtype=torch.uint8, device=positions.device)
    low[: count * width] = ((positions[:, None] >> shifts) & 1).flatten().to(torch.uint8)
    high = torch.zeros(8 * (payload.numel() - boundary), dtype=torch.uint8, device=positions.device)
    high[(positions >> width) + torch.arange(count, device=positions.device)] = 1
    payload.copy_(torch.cat((_pack(low, 1), _pack(high, 1))))


def elias_fano_decode(payload: Tensor, universe: int, positions: Tensor) -> None:
    """See :meth:`gradwire.kernels.Kernels.elias_fano_decode`."""
    count = positions.numel()
    if not count:
        return
    width, boundary = elias_fano_layout(count, universe, payload.numel())
    high = _unpack(payload[boundary:], 1).nonzero().flatten()
    if high.numel() != count:
        raise PayloadError(f"Elias-Fano bytes hold {high.numel()} positions, not {count}")
    numbers = torch.arange(count, device=payload.device)
    low = _unpack(payload[:boundary], 1)[: count * width].view(count, width).to(torch.int64)
    decoded = (high - numbers << width) + (low << torch.arange(width, device=payload.device)).sum(1)
    if int(decoded[-1]) >= universe or bool((decoded.diff() <= 0).any()):
        raise PayloadError(f"Elias-Fano positions are not ascending, distinct and below {universe}")
    positions.copy_(decoded)
