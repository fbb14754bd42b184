"""Workers in nodes, each with as many: those of a node average densely among themselves before anything leaves it."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gradwire.codecs.quantize import parse
from gradwire.errors import ConfigurationError
from gradwire.methods import Method

_DTYPES = {"": torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16}
_EXPECTED = (
    "give the number of workers a node, such as inside=8, inside='8:bf16' or inside='8:nearest:8', or inside='node' "
    "under torchrun"
)


@dataclass(frozen=True)
class Inside:
    """What ``inside=`` asks for.

    Attributes:
        workers: Of a node; None for as many as torchrun started on this one.
        dtype: Of gradients and averages on their way within a node.
        codec: The name of what writes them instead; none if empty.
    """

    workers: int | None
    dtype: torch.dtype = torch.float32
    codec: str = ""

    @classmethod
    def parse(cls, given: int | str) -> Inside:
        """Reads ``8``, ``"8"``, ``"node"``, or one of these with ``":bf16"`` or ``":"`` and a codec behind it.

        Raises:
            ConfigurationError: If it is none of these.
        """
        workers, _, written = str(given).partition(":")
        known = workers == "node" or (workers.isdecimal() and int(workers) >= 1)
        if isinstance(given, bool) or not known:
            raise ConfigurationError(f"inside={given!r} is not possible; {_EXPECTED}")
        codec = "" if written in _DTYPES else written
        if codec and parse(codec).news_bytes:
            raise ConfigurationError(f"inside={given!r}: the size of what {codec} writes depends on data; {_EXPECTED}")
        return cls(None if workers == "node" else int(workers), _DTYPES.get(written, torch.float32), codec)

    def of(self, ranks: Sequence[int], environment: Mapping[str, str] = os.environ) -> Nodes:
        """The nodes of a group's workers.

        Args:
            ranks: Their ranks among all processes, in the group's order.
            environment: What torchrun gave this process.

        Raises:
            ConfigurationError: If they are in no nodes of as many each, one node after the other.
        """
        if self.workers is not None:
            if len(ranks) % self.workers:
                raise ConfigurationError(
                    f"{len(ranks)} workers are no nodes of inside={self.workers} each; start as many on every node, "
                    "or leave inside out"
                )
            return Nodes(len(ranks) // self.workers, self.workers, self.dtype, self.codec)
        try:
            started, place, rank = (int(environment[key]) for key in ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "RANK"))
        except (KeyError, ValueError):
            raise ConfigurationError(
                "inside='node' reads LOCAL_WORLD_SIZE, LOCAL_RANK and RANK, which torchrun sets and this process "
                "lacks; give the number of workers a node, such as inside=8"
            ) from None
        node_of = [each // started for each in ranks]
        counts = Counter(node_of)
        if rank % started != place or len(set(counts.values())) > 1 or node_of != sorted(node_of):
            raise ConfigurationError(
                f"inside='node': rank {rank} is worker {place} of {started} on its node, so ranks {list(ranks)} are no "
                "nodes of as many workers each, one after the other; start as many on every node, or leave inside out"
            )
        return Nodes(len(counts), counts[node_of[0]], self.dtype, self.codec)

    def __str__(self) -> str:
        workers = "node" if self.workers is None else str(self.workers)
        written = self.codec or ("bf16" if self.dtype == torch.bfloat16 else "")
        return f"{workers}:{written}" if written else workers


@dataclass(frozen=True)
class Nodes:
    """Workers in a grid: rank ``r`` has place ``r % workers`` in node ``r // workers``.

    Attributes:
        count: Number of nodes.
        workers: Workers of a node.
        dtype: Of gradients and averages on their way within a node.
        codec: The name of what writes them instead; none if empty.
    """

    count: int
    workers: int
    dtype: torch.dtype = torch.float32
    codec: str = ""

    def place(self, rank: int) -> int:
        """Which of its node's workers a rank is."""
        return rank % self.workers

    def node(self, rank: int) -> int:
        """Which node a rank is in."""
        return rank // self.workers

    def mates(self, rank: int) -> list[int]:
        """The ranks of a rank's node."""
        first = self.node(rank) * self.workers
        return list(range(first, first + self.workers))

    def peers(self, rank: int) -> list[int]:
        """The ranks of a rank's place in each node."""
        return list(range(self.place(rank), self.count * self.workers, self.workers))

    def rows(self, length: int, place: int) -> tuple[int, int]:
        """First and one past the last of ``length`` rows that a place has."""
        return place * length // self.workers, (place + 1) * length // self.workers

    def part(self, shape: tuple[int, ...], place: int) -> tuple[int, ...]:
        """The shape of a place's rows of a tensor."""
        first, stop = self.rows(shape[0], place)
        return (stop - first, *shape[1:])

    def parts(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The shapes that a tensor is cut into; none if it has too few rows for all."""
        if not shape or shape[0] < self.workers or not math.prod(shape):
            return []
        return [self.part(shape, place) for place in range(self.workers)]

    def share(self, method: Method, shape: tuple[int, ...]) -> bool:
        """Whether the workers of a node share a tensor: if each gets some rows, and the method takes them."""
        parts = self.parts(shape) if self.workers > 1 else []
        return bool(parts) and all(method.accepts(part) for part in parts)

    def __str__(self) -> str:
        nodes = "1 node" if self.count == 1 else f"{self.count} nodes"
        inside = self.codec or ("bfloat16" if self.dtype == torch.bfloat16 else "float32")
        return f"{nodes} of {self.workers}, which average in {inside} inside"
