"""Raw values, or shifted mantissas of two bytes, one or none, by exponent."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.errors import PayloadError
from gradwire.kernels.compensated import Compensated
from gradwire.kernels.reference._torch import (
    Piece,
    as_bytes,
    flat_runs,
    keep_rest,
    pack,
    padded,
    pieces_of,
    sum_in_order,
    unpack,
)
from gradwire.layout import Block

HEAD = 8
"""Bytes of doublings and of what was wanted."""

SLACK = 4
"""Bytes after the last value, so that every value can be read as a word."""

MOST_DOUBLINGS = 255
"""So large a bound sends nothing."""

WIDTHS = (0, 1, 2, 4)
"""Bytes of a value with each tag."""


def inceptionn_edges(bound: int, doublings: int) -> tuple[int, int, int]:
    """Exponents, as float32 has them, of the smallest values that take one byte, two and four.

    Up to ``bound`` 14 these are ``127 - bound``, half way to 127 rounded up, and 127. For smaller bounds the classes
    end as soon as steps of the bound no longer reach on.
    """
    low = 127 - bound + doublings
    return low, low + min((bound + 1) // 2, 7), low + min(bound, 15)


def inceptionn_offsets(block: Block) -> tuple[int, int]:
    """Bytes before the tags and before the values."""
    marks = HEAD + padded(-(-block.segment_count // 8))
    return marks, marks + padded(block.positions // 4)


def inceptionn_payload_bytes(block: Block, room: int) -> int:
    """Size of an INCEPTIONN payload with room for ``room`` bytes of values, a multiple of 4."""
    return inceptionn_offsets(block)[1] + room + SLACK


def _tags(bits: Tensor, edges: tuple[int, int, int]) -> Tensor:
    """0 to 3, for the magnitude bits of values."""
    exponent = bits >> 23
    return sum(((exponent >= edge).long() for edge in edges), torch.zeros_like(exponent))


def inceptionn_encode(block: Block, source: Compensated, payload: Tensor, bound: int) -> None:
    """Shifted mantissas, cut off below ``2**-bound``; the bound is doubled until they fit the payload.

    Where that would leave none, it is doubled once less, and as many are sent as fit, the first ones.
    """
    device = source.gradient.device
    before_tags, before_values = inceptionn_offsets(block)
    room = payload.numel() - before_values - SLACK
    widths = torch.tensor(WIDTHS, device=device)
    t = torch.zeros(block.positions, device=device, dtype=torch.float32)
    marks = torch.zeros(8 * (before_tags - HEAD), dtype=torch.uint8, device=device)
    pieces: list[Piece] = []
    for segment in range(block.segment_count):
        mine = pieces_of(block, segment, source)
        pieces += mine
        finite = all(bool(piece.t.isfinite().all()) for piece in mine)
        marks[segment] = not finite
        if finite:
            for piece in mine:
                t[piece.span] = piece.t

    bits = t.view(torch.int32).long()
    magnitude = bits & 0x7FFFFFFF
    wanted = int(widths[_tags(magnitude, inceptionn_edges(bound, 0))].sum())
    doublings, needed = 0, wanted
    while needed > room:
        doublings += 1
        needed = int(widths[_tags(magnitude, inceptionn_edges(bound, doublings))].sum())
    doublings -= doublings > 0 and not needed
    _, middle, top = edges = inceptionn_edges(bound, doublings)
    tags = _tags(magnitude, edges)
    tags[widths[tags].cumsum(0) > room] = 0
    needed = int(widths[tags].sum())

    mantissa = (magnitude & 0x7FFFFF) | 0x800000
    exponent, sign = magnitude >> 23, bits >> 31 & 1
    one = mantissa >> (23 + middle - 7 - exponent).clamp(0, 31) | sign << 7
    two = mantissa >> (23 + top - 15 - exponent).clamp(0, 31) | sign << 15
    code = torch.where(tags == 1, one, torch.where(tags == 2, two, bits & 0xFFFFFFFF))
    octets = torch.stack([code >> shift & 0xFF for shift in (0, 8, 16, 24)], 1)
    written = octets[torch.arange(4, device=t.device) < widths[tags][:, None]].to(torch.uint8)

    head = torch.tensor([doublings, -(-wanted // 4)], dtype=torch.int32, device=t.device)
    payload.zero_()
    payload[:before_tags] = torch.cat((as_bytes(head), pack(marks, 1)))
    payload[before_tags : before_tags + block.positions // 4] = pack(tags, 2)
    payload[before_values : before_values + needed] = written
    sent = _decoded(block, payload, bound)
    keep_rest(pieces, sent)


def _decoded(block: Block, payload: Tensor, bound: int) -> Tensor:
    """The value at each position."""
    before_tags, before_values = inceptionn_offsets(block)
    widths = torch.tensor(WIDTHS, device=payload.device)
    _, middle, top = inceptionn_edges(bound, int(payload[:4].clone().view(torch.int32)))
    tags = unpack(payload[before_tags : before_tags + block.positions // 4], 2).long()
    for gap in _gaps(block):
        tags[gap] = 0
    ends = widths[tags].cumsum(0)
    places = before_values + ends - widths[tags]
    word = sum((payload[places + byte].long() << 8 * byte for byte in range(4)), torch.zeros_like(places))
    one, two = ((word & mask).float() * 2.0 ** (edge - 127) for mask, edge in ((0x7F, middle - 7), (0x7FFF, top - 15)))
    raw = torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32).view(torch.float32)
    one, two = torch.where(word & 0x80 > 0, -one, one), torch.where(word & 0x8000 > 0, -two, two)
    values = torch.where(tags == 3, raw, torch.where(tags == 2, two, torch.where(tags == 1, one, 0.0)))
    marks = unpack(payload[HEAD:before_tags], 1)
    for segment in range(block.segment_count):
        if marks[segment]:
            for _, start, stop, position in flat_runs(block, segment):
                values[position : position + stop - start] = torch.nan
    return values


def _gaps(block: Block) -> list[slice]:
    """Positions that alignment leaves between runs."""
    ends = [int(length + position) for _, length, position in block.runs]
    nexts = [*block.runs[:, 2].tolist(), block.positions]
    return [slice(end, following) for end, following in zip(ends, nexts[1:], strict=True)]


def inceptionn_decode(block: Block, payloads: Tensor, out: Tensor, weight: float, bound: int) -> None:
    """``out = weight * sum of the decoded payloads`` over the runs, in row order; PayloadError unless sound."""
    before_tags, _ = inceptionn_offsets(block)
    widths = torch.tensor(WIDTHS, device=payloads.device)
    for payload in payloads:
        tags = unpack(payload[before_tags : before_tags + block.positions // 4], 2).long()
        check_inceptionn(block, payload, int(widths[tags].sum()))
    decoded = [_decoded(block, payload, bound) for payload in payloads]
    for start, length, position in block.runs.tolist():
        out[start : start + length] = sum_in_order([row[position : position + length] for row in decoded]) * weight


def check_inceptionn(block: Block, payload: Tensor, needed: int) -> None:
    """Raises PayloadError unless a head is an encoder's and the tags ask for no more bytes than there are."""
    room = payload.numel() - inceptionn_offsets(block)[1] - SLACK
    doublings, wanted = payload[:HEAD].clone().view(torch.int32).tolist()
    if not 0 <= doublings <= MOST_DOUBLINGS or not 0 <= wanted <= block.positions:
        raise PayloadError(
            f"a payload has its error bound doubled {doublings} times and wanted {wanted} words, where up to "
            f"{MOST_DOUBLINGS} and {block.positions} are possible; was it encoded with another configuration?"
        )
    if needed > room:
        raise PayloadError(
            f"a payload's tags ask for {needed} bytes of {room} there are; was it encoded with another configuration?"
        )
