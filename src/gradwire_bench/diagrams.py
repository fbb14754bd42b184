"""Pictures of what gradwire's own code does: ``python -m gradwire_bench.diagrams docs/images``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.distributed as dist
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from torch import Tensor

from gradwire.codecs.index import EliasFano
from gradwire.codecs.quantize.values import parse
from gradwire.codecs.select import TopMagnitudes
from gradwire.codecs.sparse import Sparse
from gradwire.engine import DensePolicy
from gradwire.engine.configuration import Configuration
from gradwire.engine.engine import Engine
from gradwire.kernels.reference.elias_fano import elias_fano_layout
from gradwire.layout import Block, Granularity, Slot, flat_slots
from gradwire.memory import NONE
from gradwire.wire import Meter, Scheduler, Synchronization
from gradwire.wire.transport import Pending
from gradwire_bench import shapes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_GREY, _INK = "#9a9a9a", "#222222"

Row = Literal["backward", "encode", "wire", "decode"]


@dataclass(frozen=True)
class Work:
    """Something that took time.

    Attributes:
        row: What it was.
        bucket: For which bucket, from 0; None for small averages of several.
        round: Which round of it, from 0.
        start: When, in milliseconds.
        stop: Until when.
    """

    row: Row
    bucket: int | None
    round: int
    start: float
    stop: float


@dataclass(eq=False)
class Clock:
    """The time of one worker: its processor, which does one thing at a time, and its link, which does so, too.

    Attributes:
        now: Milliseconds since the backward pass began.
        link_free: When the link has sent all that was issued.
        done: All work so far.
        asked: Of what payload, by its place in memory, which bucket and round is.
    """

    now: float = 0.0
    link_free: float = 0.0
    done: list[Work] = field(default_factory=list)
    asked: dict[int, tuple[int, int]] = field(default_factory=dict)

    def compute(self, row: Row, bucket: int, number: int, duration: float) -> None:
        """Keeps the processor busy."""
        self.done.append(Work(row, bucket, number, self.now, self.now + duration))
        self.now += duration

    def send(self, payload: Tensor, duration: float) -> float:
        """Puts a payload behind all others on the link; says when it will be there."""
        bucket, number = self.asked.get(payload.data_ptr(), (None, 0))
        start = max(self.now, self.link_free)
        self.link_free = start + duration
        self.done.append(Work("wire", bucket, number, start, self.link_free))
        return self.link_free


class ClockedTransport:
    """Workers that all bring what this one does, over a link of a given rate, in the time of a clock.

    Args:
        clock: Told what travels when.
        world_size: Number of workers.
        rate: Bytes a millisecond.
    """

    rank = 0

    def __init__(self, clock: Clock, world_size: int, rate: float) -> None:
        self._clock = clock
        self._rate = rate
        self.world_size = world_size

    def all_reduce(self, buffer: Tensor, operation: dist.ReduceOp.RedOpType) -> Pending:
        """Sums ``buffer``, or leaves it as the largest."""
        summed = buffer if operation == dist.ReduceOp.MAX else buffer.mul_(self.world_size)
        return self._sent(buffer, 2 * buffer.nbytes / self.world_size, summed)

    def broadcast(self, buffer: Tensor, source: int) -> Pending:
        """Leaves ``buffer`` as it is."""
        return self._sent(buffer, buffer.nbytes / (self.world_size - 1), buffer)

    def exchange(self, payload: Tensor, partner: int) -> Pending:
        """Brings the same back."""
        return self._sent(payload, payload.nbytes / (self.world_size - 1), payload)

    def all_gather(self, payload: Tensor, straight: bool = False) -> Pending:
        """Brings the same from everybody."""
        return self._sent(payload, payload.nbytes, payload.expand(self.world_size, -1).contiguous())

    def all_to_all(self, payloads: Tensor) -> Pending:
        """Brings row 0, which is this worker's, from everybody."""
        return self._sent(payloads, payloads.nbytes / self.world_size, payloads[:1].expand_as(payloads).contiguous())

    def _sent(self, payload: Tensor, share: float, answer: Tensor) -> Pending:
        """Sends ``share`` bytes to each of the others."""
        there = self._clock.send(payload, share * (self.world_size - 1) / self._rate)

        def wait() -> Tensor:
            self._clock.now = max(self._clock.now, there)
            return answer

        return wait


WORKERS = 4
BACKWARD_MS = 70.0
LINK = 1e9 / 8 / 1000
"""1 Gbit/s, in bytes a millisecond."""
SPEED = 2.5e6
"""Bytes of float32 gradient that are encoded, or whose payloads are decoded, in a millisecond."""
BUCKET_BYTES = 25 * 2**20


def timeline() -> list[Work]:
    """One step of EF-SignSGD on the sharded route over ResNet-50, in the order that the wire's scheduler makes of it.

    Gradients become ready at an even pace from the last layer to the first, in DDP's buckets. What is encoded and
    decoded takes time in proportion to it; the method, its payloads and the order are the real ones.
    """
    clock = Clock()
    choice = Configuration.make("efsignsgd", {}, dense=DensePolicy())
    engine = Engine(choice, 0, WORKERS, torch.device("cpu"))
    scheduler = Scheduler(ClockedTransport(clock, WORKERS, LINK), Meter(), choice.fuse_bytes)
    buckets = _buckets(shapes.get("resnet50"))
    total = sum(bucket[-1].stop for bucket in buckets)
    ready = 0.0
    for number, slots in enumerate(buckets):
        begun, ready = ready, ready + BACKWARD_MS * slots[-1].stop / total
        clock.done.append(Work("backward", number, 0, begun, ready))
        clock.now = max(clock.now, ready)
        gradient = torch.ones(slots[-1].stop)
        compressed, *rest = engine.synchronizations(engine.unit(slots), gradient)
        started = [_timed(compressed, clock, number, gradient.nbytes / SPEED), *rest]
        scheduler.submit(started, lambda: None, last=number == len(buckets) - 1)
    return clock.done


def _buckets(parameters: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[Slot, ...]]:
    """As DDP forms them: from the last parameter on, until a bucket is full."""
    buckets: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    for name, shape in reversed(parameters):
        if 4 * shapes.numel(buckets[-1]) >= BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append((name, shape))
    return [flat_slots(bucket) for bucket in buckets]


def _timed(average: Synchronization, clock: Clock, bucket: int, duration: float) -> Synchronization:
    """The same requests, with the processor busy before each and after the last."""
    clock.compute("encode", bucket, 0, duration)
    answer, number = None, 0
    while True:
        try:
            request = next(average) if answer is None else average.send(answer)
        except StopIteration:
            return
        for each in request if isinstance(request, list) else [request]:
            clock.asked[each.payload.data_ptr()] = bucket, number
        answer = yield request
        number += 1
        # The owner reads n shares and writes one; then everybody reads all shares.
        clock.compute("decode", bucket, number, duration / 2)


def draw_timeline(figure: Figure) -> None:
    """Draws what a step's processor and link do, bucket by bucket."""
    work = timeline()
    axes = figure.add_subplot()
    rows: Sequence[Row] = ("backward", "encode", "wire", "decode")
    for each in work:
        height = len(rows) - 1 - rows.index(each.row)
        colour = _GREY if each.bucket is None else _COLOURS[each.bucket % len(_COLOURS)]
        second = each.round == {"wire": 1, "decode": 2}.get(each.row)
        width = each.stop - each.start
        axes.barh(
            height, width, left=each.start, height=0.62, color=colour, edgecolor="white", hatch="////" if second else ""
        )
        if each.bucket is not None and width > 1:
            label = str(each.bucket + 1)
            backed = {"boxstyle": "round,pad=0.15", "facecolor": colour, "edgecolor": "none"} if second else None
            axes.text(each.start + width / 2, height, label, ha="center", va="center", color="white", bbox=backed)
    axes.set_xlim(0, 1.01 * max(each.stop for each in work))
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set_yticks(range(len(rows)), list(reversed(rows)))
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("ms since the backward pass began")
    axes.spines[["top", "right", "left"]].set_visible(False)
    _titles(
        axes,
        "A step of EF-SignSGD over ResNet-50's four buckets",
        "plain: to the owners of shards, who average and encode again; hatched: from them; grey: small averages "
        f"({WORKERS} workers, 1 Gbit/s)",
    )


@dataclass(frozen=True)
class Part:
    """Some bytes of a payload.

    Attributes:
        name: What they are.
        nbytes: How many, one after another.
    """

    name: str
    nbytes: int


LAYER = (128, 64, 3, 3)
RATIO = 0.01


def payload() -> tuple[Tensor, list[Part], int]:
    """What top-k writes of a convolution's gradient with 4-bit values, what its bytes are, and how many it chose."""
    block = Block.cut(flat_slots([("conv.weight", LAYER)]), Granularity("layer"))
    values = parse("qsgd:4")
    codec = Sparse(TopMagnitudes(RATIO), values, EliasFano())
    written = torch.empty(codec.payload_bytes(block), dtype=torch.uint8)
    gradient = torch.randn(block.numel, generator=torch.Generator().manual_seed(0))
    codec.encode(block, gradient, NONE, written, key=0)
    count = int(codec.select.counts(block).sum())
    chosen = Block.cut(flat_slots([("values", (count,))]), Granularity("layer"))
    scales = 4 * chosen.divided(512).segment_count
    codes = values.size(chosen) - scales
    indices = written.numel() - scales - codes
    _, low = elias_fano_layout(count, block.positions, indices)
    names = ("scales of 512 values each, float32", "4-bit codes of the values", "low bits of the positions")
    parts = [Part(name, nbytes) for name, nbytes in zip(names, (scales, codes, low), strict=True)]
    return written, [*parts, Part("high bits, gaps in unary", indices - low)], count


def draw_payload(figure: Figure) -> None:
    """Draws every bit of a payload, and what it belongs to."""
    written, parts, count = payload()
    columns = 256
    bits = np.unpackbits(written.numpy(), bitorder="little")
    rows = -(-len(bits) // columns)
    belongs = np.repeat(np.arange(len(parts)), [8 * part.nbytes for part in parts])
    image = np.ones((rows * columns, 3))
    full = np.array([to_rgb(_COLOURS[index]) for index in (3, 0, 1, 2)])
    image[: len(bits)] = np.where(bits[:, None] == 1, full[belongs], 1 - (1 - full[belongs]) * 0.22)
    axes = figure.add_subplot()
    axes.imshow(image.reshape(rows, columns, 3), interpolation="nearest", aspect=2.4)
    axes.set_xticks([0, 64, 128, 192, 256], ["0", "64", "128", "192", "256 bits"], fontsize=8)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    start = 0
    for index, part in enumerate(parts):
        middle = (start + part.nbytes / 2) * 8 / columns
        told = f"{part.name}\n{part.nbytes} bytes, {8 * part.nbytes / count:.2f} bits a value"
        axes.text(columns + 4, max(middle, 0.5) - 0.5, told, va="center", fontsize=9, color=full[index] * 0.8)
        start += part.nbytes
    dense = 4 * int(np.prod(LAYER))
    _titles(
        axes,
        f"The {written.numel():,} bytes that topk sends of a layer's {dense:,}",
        f"every bit of the payload, dark where it is 1: {count} of {dense // 4:,} values, "
        f'ratio={RATIO}, values="qsgd:4", indices="elias-fano"',
    )


PARAMETERS = (("conv1", (6, 80)), ("conv2", (10, 96)), ("fc1", (16, 104)), ("fc2", (7, 100)))
BUCKETS = ((0, 1), (2, 3))
"""Which parameters are in which bucket."""


def cuts() -> list[tuple[str, list[Block]]]:
    """One buffer's blocks at each granularity: those of each bucket, or the one of all."""
    slots = flat_slots(PARAMETERS)
    buckets = [[slots[index] for index in bucket] for bucket in BUCKETS]

    def by_bucket(text: str) -> list[Block]:
        return [Block.cut(bucket, Granularity.parse(text)) for bucket in buckets]

    return [
        ("layer", by_bucket("layer")),
        ("bucket", by_bucket("bucket")),
        ("model", [Block.cut(slots, Granularity("model"))]),
        ("block:256", by_bucket("block:256")),
    ]


def draw_cuts(figure: Figure) -> None:
    """Draws the segments of one buffer at four granularities."""
    axes = figure.add_subplot()
    slots = flat_slots(PARAMETERS)
    shown = cuts()
    for height, (_, blocks) in enumerate(reversed(shown)):
        segment = 0
        for block in blocks:
            for first, last in zip(block.segments[:-1], block.segments[1:], strict=True):
                runs = block.runs[first:last]
                start, stop = int(runs[0, 0]), int(runs[-1, 0] + runs[-1, 1])
                colour = _COLOURS[segment % len(_COLOURS)]
                axes.barh(height, stop - start, left=start, height=0.6, color=colour, edgecolor="white", linewidth=2)
                axes.text((start + stop) / 2, height, str(segment), ha="center", va="center", color="white", fontsize=9)
                for edge in runs[1:, 0].tolist():
                    axes.plot([edge, edge], [height - 0.3, height + 0.3], color="white", linewidth=0.8, linestyle=":")
                segment += 1
    top = len(shown) - 0.45
    for slot in slots:
        axes.text((slot.offset + slot.stop) / 2, top, f"{slot.name}\n{slot.numel}", ha="center", fontsize=9, color=_INK)
    for bucket in BUCKETS[1:]:
        axes.axvline(slots[bucket[0]].offset, color=_INK, linewidth=0.9, linestyle="--")
    axes.set_xlim(0, slots[-1].stop)
    axes.set_ylim(-0.45, top + 0.45)
    axes.set_yticks(range(len(shown)), [name for name, _ in reversed(shown)])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("element of the flat buffer; dashed: where the second bucket begins")
    axes.spines[["top", "right", "left"]].set_visible(False)
    _titles(
        axes,
        "One buffer at four granularities",
        "a number is a segment: one scale, one top-k; dotted: runs of one segment that belong to different parameters",
    )


def _titles(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", pad=24)
    axes.text(0, 1.0, subtitle + "\n", transform=axes.transAxes, fontsize=8.5, color="#666666", linespacing=0.5)


PICTURES: dict[str, tuple[tuple[float, float], Callable[[Figure], None]]] = {
    "timeline.png": ((10, 3.8), draw_timeline),
    "payload.png": ((10, 3.5), draw_payload),
    "granularities.png": ((10, 3.8), draw_cuts),
}


def main(folder: Path) -> None:
    """Draws all of them as PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (inches, draw) in PICTURES.items():
        figure = Figure(figsize=inches, layout="constrained")
        draw(figure)
        figure.savefig(folder / name, dpi=130, facecolor="white")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/images"))
