"""What is timed on a GPU and held to the CPU's bits: every kernel that there is in Triton, on one gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.kernels import Code, Compensated, codes, reference
from gradwire.kernels.reference import deadzone_payload_bytes, deadzone_room, deadzone_tile
from gradwire.kernels.reference._torch import LANES
from gradwire.kernels.reference.deadzone_step import chunks_sampled
from gradwire.layout import Block, Granularity, flat_slots
from gradwire.randomness import key_of

ROWS = 8
"""Payloads that are decoded at once."""

BUCKET = 512
DEAD_ZONE_BITS = 0.1
DENSITY = 0.01
RANK = 4
KEY = key_of(0, 0)

QUANTISERS = "quantisers"
SPARSE = "top-k"
LOW_RANK = "low rank"
SUMS = "sums of sparse rows"
MEMORY = "memories"
TARGETS = {QUANTISERS: 0.75, SPARSE: 0.6, LOW_RANK: 0.5, SUMS: 0.5, MEMORY: 0.85}
"""The least share of a copy's bandwidth that each group promises, with 25 M values."""

CODES: dict[str, tuple[Code, bool]] = {
    "sign": (codes.Sign(), False),
    "sign, euclidean": (codes.Sign(norm=2), False),
    "vote": (codes.Vote(), False),
    "three votes": (codes.Ballot(), False),
    "votes of 4 bits": (codes.Ballot(4), False),
    "who wins": (codes.Ballot(signs=True), False),
    "two means": (codes.OneBit(), False),
    "2 bits of 512": (codes.QSGD(2), True),
    "4 bits of 512": (codes.QSGD(4), True),
    "4 bits, euclidean": (codes.QSGD(4, euclidean=True), False),
    "8 bits, nearest, of 512": (codes.QSGD(8, nearest=True), True),
    "nuqsgd, 4 bits": (codes.NUQSGD(4), False),
    "nuqsgd, 8 bits": (codes.NUQSGD(8), False),
    "fitted levels, 4 bits": (codes.NonUniform.powers(4), False),
    "ternary": (codes.TernGrad(), False),
    "ternary, clipped": (codes.TernGrad(clip=2.5), False),
    "3lc": (codes.ThreeLC(1.3), False),
    "natural, 8 bits": (codes.Natural(8), False),
    "natural, 9 bits": (codes.Natural(9), False),
    "exponent": (codes.Exponent(), False),
    "dynamic": (codes.Dynamic(), False),
}
"""Of every class one at least, and whether it has a scale for every 512 values; what the GPU's bits are held to."""

TIMED = set(CODES) - {
    "sign, euclidean",
    "votes of 4 bits",
    "who wins",
    "nuqsgd, 8 bits",
    "ternary, clipped",
    "natural, 9 bits",
}
"""What differs little from another is not."""


@dataclass(frozen=True)
class Operation:
    """A call of a kernel.

    Attributes:
        name: What it does.
        group: Of :data:`TARGETS`; empty for what nothing is promised of.
        bytes_per_value: Of the gradient: what has to be read and written at least.
        run: Does it.
        results: What it writes.
        exact: Whether its bits are the CPU's; else it is as close as float32 is.
    """

    name: str
    group: str
    bytes_per_value: float
    run: Callable[[], object]
    results: tuple[Tensor, ...]
    exact: bool = True


def one_segment(numel: int) -> Block:
    """A block of a single parameter."""
    return Block.cut(flat_slots([("weight", (numel,))]), Granularity("layer"))


def quantisers(name: str, block: Block, values: Tensor) -> Iterator[Operation]:
    """Encoding with a residual and without, and decoding of several payloads, by one of :data:`CODES`."""
    (code, of_buckets), numel = CODES[name], max(block.numel, 1)
    own = block.divided(BUCKET) if of_buckets else block
    payloads = torch.zeros(ROWS, kernels.payload_bytes(code, own), dtype=torch.uint8, device=values.device)
    share, passes = payloads.shape[1] / numel, 1 if of_buckets else 2
    residual, out = torch.ones_like(values), torch.zeros_like(values)
    yield Operation(
        f"{name}: encode with residual",
        QUANTISERS,
        8 * passes + 4 + share,
        lambda: kernels.encode(code, own, Compensated(values, residual, 0.9), payloads[0], KEY),
        (payloads[0], residual),
    )
    yield Operation(
        f"{name}: encode",
        QUANTISERS,
        4 * passes + share,
        lambda: kernels.encode(code, own, Compensated(values), payloads[1], KEY),
        (payloads[1],),
    )
    payloads[2:] = payloads[1]
    yield Operation(
        f"{name}: decode {ROWS}",
        QUANTISERS,
        ROWS * share + 4,
        lambda: kernels.decode(code, own, payloads, out, 1 / ROWS),
        (out,),
    )


def integers(block: Block, values: Tensor) -> Iterator[Operation]:
    """Codes of a scale that all agree on, which are added up on the way."""
    code = codes.Integers(8, 7, ROWS)
    residual, scales = torch.ones_like(values), torch.zeros(block.segment_count, device=values.device)
    written = torch.zeros(code.layout.body(block.positions), dtype=torch.uint8, device=values.device)
    left, out, norms = values.clone(), torch.zeros_like(values), torch.zeros_like(scales)
    yield Operation(
        "integer sums: scales with residual",
        QUANTISERS,
        12,
        lambda: kernels.integer_scales(code, block, Compensated(values, residual, 0.9), scales),
        (residual, scales),
    )
    yield Operation(
        "integer sums: encode with residual",
        QUANTISERS,
        9,
        lambda: kernels.integer_encode(code, block, left, True, scales, written, KEY),
        (left, written),
    )
    yield Operation(
        "integer sums: decode",
        QUANTISERS,
        5,
        lambda: kernels.integer_decode(code, block, scales, written, out),
        (out,),
    )
    yield Operation(
        "integer sums: norms",
        QUANTISERS,
        4,
        lambda: kernels.euclidean_norms(block, values, norms),
        (norms,),
    )


def memories(block: Block, values: Tensor) -> Iterator[Operation]:
    """What memories and checks do with whole blocks."""
    residual, kept = torch.ones_like(values), torch.zeros_like(values, dtype=torch.bfloat16)
    finite = torch.where(values.isfinite(), values, 1.0)
    sums = torch.zeros(1, dtype=torch.int64, device=values.device)
    words = values.view(torch.int32)[None]
    yield Operation(
        "accumulate", MEMORY, 12, lambda: kernels.accumulate(block, values, residual, 0.9, 1.0), (residual,)
    )
    yield Operation("narrow to bfloat16", MEMORY, 6, lambda: kernels.narrow(block, finite, kept, KEY), (kept,))
    yield Operation("checksums", "", 4, lambda: kernels.checksums(words, sums), (sums,))


def sparse(block: Block, values: Tensor) -> Iterator[Operation]:
    """Choices of 1 %, their positions as bytes, their values, and the sum of several such."""
    device, numel = values.device, max(block.numel, 1)
    counts = np.ceil(block.segment_numels * DENSITY).astype(np.int64)
    room = int(counts.sum())
    share = room / numel

    def places(rows: int = 1) -> Tensor:
        return torch.zeros(rows, room, dtype=torch.int64, device=device)

    top, top_values, residual = places()[0], torch.zeros(room, device=device), torch.ones_like(values)
    drawn, picked, left = places(ROWS).cpu(), torch.ones(ROWS, room, device=device), values.clone()
    for row in range(ROWS):
        reference.randomk_positions(block, counts, drawn[row], key_of(0, 0, row))
    drawn = drawn.sort(1).values.to(device)
    at_random, read, total = places()[0], torch.zeros(room, device=device), torch.zeros_like(values)
    packed = torch.zeros(reference.elias_fano_bytes(room, block.positions), dtype=torch.uint8, device=device)
    unpacked = places()[0]
    memory = Compensated(values, residual, 0.9)
    yield Operation(
        "top-k 1 %: select with residual",
        SPARSE,
        28,
        lambda: kernels.topk_select(block, memory, counts, top, top_values),
        (top, top_values, residual),
    )
    yield Operation(
        "random-k 1 %: choose",
        "",
        8 * share,
        lambda: kernels.randomk_positions(block, counts, at_random, KEY),
        (at_random,),
    )
    yield Operation("gather 1 %", "", 16 * share, lambda: kernels.gather(block, values, drawn[0], read), (read,))
    yield Operation("subtract 1 %", "", 20 * share, lambda: kernels.subtract(block, left, drawn[0], picked[0]), (left,))
    yield Operation(
        f"scatter sum of {ROWS} of 1 %",
        SUMS,
        8 + 20 * ROWS * share,
        lambda: kernels.scatter_sum(block, drawn, picked, total, 1 / ROWS),
        (total,),
    )
    yield Operation(
        "elias-fano 1 %: encode",
        "",
        8 * share + len(packed) / numel,
        lambda: kernels.elias_fano_encode(drawn[0], block.positions, packed),
        (packed,),
    )
    yield Operation(
        "elias-fano 1 %: decode",
        "",
        8 * share + len(packed) / numel,
        lambda: kernels.elias_fano_decode(packed, block.positions, unpacked),
        (unpacked,),
    )


def low_rank(block: Block, values: Tensor) -> Iterator[Operation]:
    """Products with thin factors, of the largest square that there are values for."""
    side, device = math.isqrt(values.numel()), values.device
    matrix = Block.cut(flat_slots([("matrix", (side, side))]), Granularity("layer"))
    generator = torch.Generator().manual_seed(1)
    given, found = torch.randn(RANK, side, generator=generator).to(device), torch.zeros(RANK, side, device=device)
    other = torch.zeros(RANK, side, device=device)
    finite = torch.where(values.isfinite(), values, 1.0)[: side * side]
    residual, again = torch.ones_like(finite), torch.ones_like(finite)
    out, left = torch.zeros_like(finite), torch.ones_like(finite)
    for name, kernel, to, memory in (
        ("rows", kernels.project_rows, found, residual),
        ("columns", kernels.project_columns, other, again),
    ):
        source = Compensated(finite, memory, 0.9)
        yield Operation(
            f"rank {RANK}: project {name} with residual",
            LOW_RANK,
            16,
            lambda kernel=kernel, to=to, source=source: kernel(matrix, source, given, to, subtract=None),  # type: ignore[misc]
            (to,),
            exact=False,
        )
    yield Operation(
        f"rank {RANK}: write product",
        LOW_RANK,
        12,
        lambda: kernels.write_product(matrix, given, given, out, left),
        (out, left),
        exact=False,
    )
    rows = torch.zeros(1, RANK, side, device=device)
    yield Operation(
        f"rank {RANK}: orthonormalise",
        "",
        12 * RANK * side / max(block.numel, 1),
        lambda: kernels.orthonormalise(rows.copy_(given)),
        (rows,),
    )


def dead_zone(block: Block, values: Tensor) -> Iterator[Operation]:
    """A step that is a given one, and codes of a tenth of a bit for each value."""
    tile, device = deadzone_tile(DEAD_ZONE_BITS), values.device
    payloads = torch.zeros(ROWS, deadzone_payload_bytes(block, tile, DEAD_ZONE_BITS), dtype=torch.uint8, device=device)
    residual, left, out, rounded = torch.ones_like(values), values.clone(), torch.zeros_like(values), values.clone()
    room, scales = 8 * deadzone_room(block, tile, payloads[0]), torch.zeros(block.segment_count, device=device)
    looked_at = int(chunks_sampled(block, room)[:, 1].sum())
    sample = torch.zeros(-(-looked_at // LANES) * LANES, device=device)
    yield Operation(
        "dead zone: scales with residual",
        "",
        12,
        lambda: scales.copy_(kernels.deadzone_scales(block, Compensated(values, residual, 0.9))),
        (scales, residual),
    )
    yield Operation(
        "dead zone: sample",
        "",
        8 * looked_at / max(block.numel, 1),
        lambda: sample.copy_(kernels.deadzone_sample(block, values, scales, room)),
        (sample,),
    )
    yield Operation(
        "dead zone: round by chance",
        "",
        8,
        lambda: kernels.deadzone_dither(block, values, scales * 4, KEY, rounded),
        (rounded,),
    )
    yield Operation(
        "dead zone: encode with residual",
        "",
        12,
        lambda: kernels.deadzone_encode(block, left, True, scales * 4, (100, 128, 130), tile, payloads[0]),
        (payloads[0], left),
    )
    payloads[1:] = payloads[0]
    yield Operation(
        f"dead zone: decode {ROWS}",
        "",
        8 * ROWS + 4,
        lambda: kernels.deadzone_decode(block, payloads, tile, out, 1 / ROWS),
        (out,),
    )


def subspaces(block: Block, values: Tensor) -> Iterator[Operation]:
    """Coordinates of the rows of the largest square that there are values for."""
    side, device = math.isqrt(values.numel()), values.device
    matrix = Block.cut(flat_slots([("matrix", (side, side))]), Granularity("layer"))
    basis = torch.randn(RANK, side, generator=torch.Generator().manual_seed(1)).to(device)
    found, back, combined = torch.zeros_like(basis), torch.zeros_like(values), torch.zeros_like(basis)
    rest, finite = torch.zeros_like(values), torch.where(values.isfinite(), values, 1.0)
    yield Operation(
        f"rank {RANK}: split rows",
        "",
        4 * RANK + 8,
        lambda: kernels.split_rows(matrix, Compensated(finite), basis, found, rest),
        (found, rest),
    )
    yield Operation(
        f"rank {RANK}: add product", "", 8, lambda: kernels.add_product(matrix, basis, basis, finite, back), (back,)
    )
    yield Operation(
        f"rank {RANK}: combine rows",
        "",
        4 * RANK,
        lambda: kernels.combine_rows(matrix, basis, finite, combined),
        (combined,),
    )


def others(block: Block, values: Tensor) -> Iterator[Operation]:
    """What torch has, beside ours."""
    count, half = math.ceil(DENSITY * values.numel()), torch.zeros_like(values, dtype=torch.bfloat16)
    yield Operation("cast to bfloat16, by torch", MEMORY, 6, lambda: half.copy_(values), (half,))
    yield Operation("torch.topk 1 %, for comparison", "", 4, lambda: values.abs().topk(count), ())


Family = Callable[[Block, Tensor], Iterator[Operation]]
"""Operations on one gradient, each made when it is asked for; the buffers of one may go with it."""

FAMILIES: dict[str, Family] = {
    **{name: partial(quantisers, name) for name in CODES},
    "memories": memories,
    "sparse": sparse,
    "integer sums": integers,
    "low rank": low_rank,
    "dead zone": dead_zone,
    "subspaces": subspaces,
}
