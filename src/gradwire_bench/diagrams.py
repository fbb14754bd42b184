"""Pictures of what gradwire's own code does: ``python -m gradwire_bench.diagrams docs/images``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib.colors import to_rgb
from torch import Tensor

from gradwire.codecs.index import EliasFano
from gradwire.codecs.quantize.values import parse
from gradwire.codecs.select import TopMagnitudes
from gradwire.codecs.sparse import Sparse
from gradwire.cost.clock import Row, Work
from gradwire.cost.costs import Costs, Profile, Stage
from gradwire.cost.network import Level, Links
from gradwire.cost.simulation import Setting, simulate
from gradwire.cost.workload import Workload
from gradwire.engine.configuration import Configuration
from gradwire.kernels.reference.elias_fano import elias_fano_layout
from gradwire.layout import Block, Granularity, Slot, flat_slots
from gradwire.memory import NONE
from gradwire_bench import shapes
from gradwire_bench.pictures import axes_of, save, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_GREY, _INK = "#9a9a9a", "#222222"

WORKERS = 4
BACKWARD_SECONDS = 0.07
RATE = 1e9
SPEED = 2.5e9
"""Bytes of float32 gradient that are encoded, or whose payloads are decoded, in a second."""
BUCKET_BYTES = 25 * 2**20


class _Even(Profile):
    """A device that encodes and decodes everything at one speed.

    The owner reads n shares and writes one; then everybody reads all shares: half as long each as encoding.
    """

    def of(self, configuration: Configuration) -> tuple[Costs, str]:
        return Costs((Stage(value=4 / SPEED), Stage(value=2 / SPEED))), ""


def timeline() -> list[Work]:
    """One step of EF-SignSGD on the sharded route over ResNet-50, in the order that the wire's scheduler makes of it.

    Gradients become ready at an even pace from the last layer to the first, in buckets of one size. What is encoded and
    decoded takes time in proportion to it; the method, its payloads and the order are the real ones.
    """
    buckets = tuple(_buckets(shapes.get("resnet50")))
    total = sum(bucket[-1].stop for bucket in buckets)
    backward = tuple(BACKWARD_SECONDS * bucket[-1].stop / total for bucket in buckets)
    network = Links((Level(WORKERS, RATE, 0.0),), efficiency=1.0)
    setting = Setting(Workload(buckets, backward, 0.0), network, _Even("even", "computed", ""))
    return list(simulate(Configuration.make("efsignsgd", {}), setting).work)


def _buckets(parameters: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[Slot, ...]]:
    """As DDP forms them: from the last parameter on, until a bucket is full."""
    buckets: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    for name, shape in reversed(parameters):
        if 4 * shapes.numel(buckets[-1]) >= BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append((name, shape))
    return [flat_slots(bucket) for bucket in buckets]


def draw_timeline(axes: Axes) -> None:
    """Draws what a step's processor and link do, bucket by bucket."""
    work = timeline()
    rows: Sequence[Row] = ("backward", "encode", "wire", "decode")
    for each in work:
        height = len(rows) - 1 - rows.index(each.row)
        colour = _GREY if each.unit is None else _COLOURS[each.unit % len(_COLOURS)]
        second = each.round == {"wire": 1, "decode": 2}.get(each.row)
        start, width = 1e3 * each.start, 1e3 * (each.stop - each.start)
        axes.barh(
            height, width, left=start, height=0.62, color=colour, edgecolor="white", hatch="////" if second else ""
        )
        if each.unit is not None and width > 1:
            label = str(each.unit + 1)
            backed = {"boxstyle": "round,pad=0.15", "facecolor": colour, "edgecolor": "none"} if second else None
            axes.text(start + width / 2, height, label, ha="center", va="center", color="white", bbox=backed)
    axes.set_xlim(0, 1010 * max(each.stop for each in work))
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set_yticks(range(len(rows)), list(reversed(rows)))
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("ms since the backward pass began")
    axes.spines[["top", "right", "left"]].set_visible(False)
    titled(
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


def draw_payload(axes: Axes) -> None:
    """Draws every bit of a payload, and what it belongs to."""
    written, parts, count = payload()
    columns = 256
    bits = np.unpackbits(written.numpy(), bitorder="little")
    rows = -(-len(bits) // columns)
    belongs = np.repeat(np.arange(len(parts)), [8 * part.nbytes for part in parts])
    image = np.ones((rows * columns, 3))
    full = np.array([to_rgb(_COLOURS[index]) for index in (3, 0, 1, 2)])
    image[: len(bits)] = np.where(bits[:, None] == 1, full[belongs], 1 - (1 - full[belongs]) * 0.22)
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
    titled(
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


def draw_cuts(axes: Axes) -> None:
    """Draws the segments of one buffer at four granularities."""
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
    titled(
        axes,
        "One buffer at four granularities",
        "a number is a segment: one scale, one top-k; dotted: runs of one segment that belong to different parameters",
    )


PICTURES: dict[str, tuple[tuple[float, float], Callable[[Axes], None]]] = {
    "timeline.png": ((10, 3.8), draw_timeline),
    "payload.png": ((10, 3.5), draw_payload),
    "granularities.png": ((10, 3.8), draw_cuts),
}


def main(folder: Path) -> None:
    """Draws all of them as PNG files."""
    for name, (inches, draw) in PICTURES.items():
        figure, axes = axes_of(inches)
        draw(axes)
        save(figure, folder / name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs/images"))
