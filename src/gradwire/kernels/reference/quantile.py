"""Means of equally filled buckets."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.compensated import Compensated
from gradwire.kernels.reference._torch import (
    Piece,
    as_bytes,
    flat_runs,
    keep_rest,
    pack,
    padded,
    pieces_of,
    segment_total,
    sum_in_order,
    unpack,
)
from gradwire.layout import Block, Int64Array, aligned
from gradwire.randomness import MASK32, hash32, mix64


class Form(NamedTuple):
    """How buckets are written, as :class:`gradwire.codecs.quantize.Quantile` documents it."""

    buckets: int
    rows: int
    columns: float
    groups: int

    @property
    def bits(self) -> int:
        """Bits of a bucket's number."""
        return (self.buckets - 1).bit_length()

    @property
    def planes(self) -> int:
        """Bits of a group's number."""
        return (self.groups - 1).bit_length()

    def means(self, block: Block) -> Int64Array:
        """Where the means of each segment start, and where the last ones end."""
        return np.concatenate(([0], np.cumsum(np.minimum(block.segment_numels, self.buckets)))).astype(np.int64)

    def wide(self, block: Block) -> Int64Array:
        """Columns of the sketch of each group of a segment."""
        wide: Int64Array = np.ceil(block.segment_numels * self.columns / self.groups).astype(np.int64)
        return wide

    def offsets(self, block: Block) -> tuple[int, int, int, int]:
        """Bytes before the means, before the codes or groups, before the sketches, and in all."""
        head = 4 if self.rows else 0
        codes = head + 4 * int(self.means(block)[-1])
        cells = codes + block.positions * (self.planes if self.rows else self.bits) // 8
        sizes = [aligned(self.rows * self.groups * wide) * self.bits // 8 for wide in self.wide(block).tolist()]
        return head, codes, cells, padded(cells + sum(sizes))


def quantile_encode(block: Block, source: Compensated, payload: Tensor, form: Form, key: int) -> None:
    """Means of equally filled buckets, and each value's bucket or a MinMaxSketch of them."""
    device = source.gradient.device
    (buckets, rows, _, groups), bits, firsts = form, form.bits, form.means(block).tolist()
    means = torch.zeros(firsts[-1], device=device, dtype=torch.float32)
    codes = torch.zeros(block.positions, dtype=torch.uint8, device=device)
    sketches = []
    pieces: list[Piece] = []
    for segment, wide in enumerate(form.wide(block).tolist()):
        mine = pieces_of(block, segment, source)
        pieces += mine
        t = torch.cat([piece.t for piece in mine])
        cells = torch.full((rows, groups * wide), buckets - 1, dtype=torch.int64, device=t.device)
        if t.isfinite().all():
            own = means[firsts[segment] : firsts[segment + 1]]
            bucket = _sort_into_buckets(t, own)
            edges = torch.tensor(group_edges(int(own.signbit().sum()), own.numel(), groups), device=t.device)
            group = torch.searchsorted(edges[1:], bucket, right=True)
            code = (group if rows else bucket).to(torch.uint8)
            for row, cell in enumerate(cells):
                column = group * wide + _hashed(key & MASK32, row, t.numel(), wide, t.device)
                cell.scatter_reduce_(0, column, bucket - edges[group], "amin")
            place = 0
            for piece in mine:
                codes[piece.span] = code[place : place + piece.t.numel()]
                place += piece.t.numel()
        else:
            means[firsts[segment] : firsts[segment + 1]] = torch.nan
        sketches.append(pack(torch.nn.functional.pad(cells.flatten(), (0, -cells.numel() % 8)), bits))
    head = torch.tensor([key & MASK32] if rows else [], dtype=torch.int64).to(torch.uint32).to(device)
    planes = [pack(codes >> plane & 1, 1) for plane in range(form.planes)] if rows else [pack(codes, bits)]
    packed = torch.cat((as_bytes(head), as_bytes(means), *planes, *sketches))
    payload.zero_()
    payload[: packed.numel()] = packed
    keep_rest(pieces, _decoded(block, payload, form))


def _sort_into_buckets(t: Tensor, means: Tensor) -> Tensor:
    """Fills in the means, of negative values first and by magnitude on each side; returns each value's number.

    A side has a share of the buckets that is its share of the values; value ``i`` of ``n`` by magnitude is in its
    bucket ``i * share // n``. Of equal magnitudes the first in the segment goes first.
    """
    order = t.abs().sort(stable=True).indices
    negative = order[t[order] < 0]
    others = order[t[order] >= 0]
    share = negative_share(len(negative), t.numel(), means.numel())
    bucket = torch.empty(t.numel(), dtype=torch.int64, device=t.device)
    for base, count, side, sign in ((0, share, negative, -1), (share, means.numel() - share, others, 1)):
        for number in range(count):
            members = side[-(-number * len(side) // count) : -(-(number + 1) * len(side) // count)]
            bucket[members] = base + number
            means[base + number] = sign * (segment_total([t[members].double().abs()]) / len(members))
    return bucket


def negative_share(negative: int, count: int, buckets: int) -> int:
    """Buckets for the negative values, at least one for either side that has any."""
    if negative in (0, count):
        return buckets if negative else 0
    return min(max((2 * buckets * negative + count) // (2 * count), 1), buckets - 1)


def group_edges(negative: int, buckets: int, groups: int) -> list[int]:
    """The first bucket of each group, and one past the last.

    The ``negative`` first buckets have a share of the groups that is their share of all; a side's group ``g`` of ``n``
    has its buckets from ``g * size / n`` on.
    """
    share = negative_share(negative, buckets, groups)
    below = [-(-group * negative // max(share, 1)) for group in range(share)]
    above = [negative - (-group * (buckets - negative) // max(groups - share, 1)) for group in range(groups - share)]
    return [*below, *above, buckets]


def _hashed(seed: int, row: int, count: int, wide: int, device: torch.device) -> Tensor:
    """The column of each value in a row of a sketch."""
    return hash32(mix64(seed + row), torch.arange(count, device=device)) * wide >> 32


def _decoded(block: Block, payload: Tensor, form: Form) -> Tensor:
    """The value at each position."""
    (_, rows, _, groups), bits, firsts = form, form.bits, form.means(block).tolist()
    head, before_codes, before_cells, _ = form.offsets(block)
    seed = int(payload[:head].clone().view(torch.uint32)) if rows else 0
    means = payload[head:before_codes].clone().view(torch.float32)
    codes = unpack(payload[before_codes:before_cells], 1 if rows else bits).long()
    if rows:
        planes = codes.view(form.planes, -1)
        codes = (planes << torch.arange(len(planes), device=codes.device)[:, None]).sum(0)
    values = torch.zeros(block.positions, device=payload.device, dtype=torch.float32)
    for segment, wide in enumerate(form.wide(block).tolist()):
        own = means[firsts[segment] : firsts[segment + 1]]
        numel, last = int(block.segment_numels[segment]), own.numel() - 1
        stop = before_cells + aligned(rows * groups * wide) * bits // 8
        cells = unpack(payload[before_cells:stop], bits)[: rows * groups * wide].view(rows, groups * wide).long()
        before_cells = stop
        hashed = [_hashed(seed, row, numel, wide, payload.device) for row in range(rows)]
        edges = torch.tensor(group_edges(int(own.signbit().sum()), own.numel(), groups), device=payload.device)
        place = 0
        for _, start, end, position in flat_runs(block, segment):
            code = codes[position : position + end - start]
            if rows:
                places = [code * wide + column[place : place + end - start] for column in hashed]
                steps = torch.stack([cell[each] for cell, each in zip(cells, places, strict=True)]).amax(0)
                code = (edges[code] + steps).minimum(edges[code + 1] - 1).maximum(edges[code])
            values[position : position + end - start] = own[code.clamp(max=last)]
            place += end - start
    return values


def quantile_decode(block: Block, payloads: Tensor, out: Tensor, weight: float, form: Form) -> None:
    """``out = weight * sum of the decoded payloads`` over the runs, summed in row order."""
    decoded = [_decoded(block, payload, form) for payload in payloads]
    for start, length, position in block.runs.tolist():
        out[start : start + length] = sum_in_order([row[position : position + length] for row in decoded]) * weight
