"""Every link between two workers of a group: how fast, how far, and what is odd about it, in plain sentences."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.units import written
from gradwire.wire import ProcessGroupTransport, Transport

SMALL, LARGE = 1 << 10, 1 << 22
REPEATS = 3
ODD = 2.0
"""A link is named if it is slower by this factor than the median of all."""


@dataclass(frozen=True)
class Pair:
    """The link between two ranks, both of which send at once, while all others rest.

    Attributes:
        ranks: Whose.
        latency: Seconds of a small message.
        rate: Bits a second of a large one, in each direction.
    """

    ranks: tuple[int, int]
    latency: float
    rate: float


def measured(group: dist.ProcessGroup, device: torch.device) -> list[Pair]:
    """Times the link of every two ranks, one after another; all ranks end with the same numbers.

    Raises:
        ConfigurationError: If there is one worker only.
    """
    transport = ProcessGroupTransport(group)
    if transport.world_size < 2:
        raise ConfigurationError("there is one worker, and no link to measure; start several with torchrun")
    return [_pair(transport, ranks, device) for ranks in combinations(range(transport.world_size), 2)]


def _pair(transport: Transport, ranks: tuple[int, int], device: torch.device) -> Pair:
    small, large = (min(_exchanges(transport, ranks, size, device)) for size in (SMALL, LARGE))
    return Pair(ranks, small, 8 * (LARGE - SMALL) / max(large - small, 1e-9))


def _exchanges(transport: Transport, ranks: tuple[int, int], size: int, device: torch.device) -> Iterator[float]:
    partner = transport.rank
    if transport.rank in ranks:
        (partner,) = set(ranks) - {transport.rank}
    payload = torch.zeros(size, dtype=torch.uint8, device=device)
    for _ in range(REPEATS):
        transport.all_reduce(torch.zeros(1, device=device, dtype=torch.float32), dist.ReduceOp.SUM)()
        start = time.perf_counter()
        transport.exchange(payload, partner)()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = torch.tensor([time.perf_counter() - start], device=device, dtype=torch.float32)
        slowest: Tensor = transport.all_reduce(seconds, dist.ReduceOp.MAX)()
        yield float(slowest)


def interface() -> str:
    """The interface that the backend was told to use, or that has the default route; empty if neither."""
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        name = os.environ.get(variable, "").split(",")[0]
        if name and not name.startswith("^"):  # which says what not to use
            return name.lstrip("=")
    table = _read(Path("/proc/net/route")).splitlines()[1:]
    return next((line.split()[0] for line in table if line.split()[1:2] == ["00000000"]), "")


def sentences(pairs: Sequence[Pair]) -> list[str]:
    """What is to be said of a group's links."""
    rate, latency = (statistics.median(getattr(pair, name) for pair in pairs) for name in ("rate", "latency"))
    said = [
        f"The links carry {_about(rate)} in each direction, a small message takes {1e6 * latency:.0f} us (medians)."
    ]
    for pair in pairs:
        a, b = pair.ranks
        if pair.rate * ODD < rate:
            said.append(
                f"The link between ranks {a} and {b} is slow: {_about(pair.rate)}. Everybody waits for it; look at the "
                "cable, the switch port and the interface of both."
            )
        elif pair.latency > ODD * latency:
            said.append(f"Ranks {a} and {b} are far apart: {1e6 * pair.latency:.0f} us for a small message.")
    name = interface()
    mtu = _read(Path("/sys/class/net") / name / "mtu").strip() if name else ""
    if mtu:
        advice = "; 9000 takes less of the cores, if all switches carry it" if int(mtu) <= 1500 else ""
        said.append(f"Rank 0 uses {name} with frames of {mtu} bytes{advice}.")
    elif name:
        said.append(f"Rank 0 is to use {name}, which is not here: set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME.")
    if control := _read(Path("/proc/sys/net/ipv4/tcp_congestion_control")).strip():
        advice = "; over long distances bbr fills a link better" if control != "bbr" and latency > 5e-3 else ""
        said.append(f"TCP's congestion control is {control}{advice}.")
    return said


def _about(rate: float) -> str:
    return written(float(f"{rate:.2g}"))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
