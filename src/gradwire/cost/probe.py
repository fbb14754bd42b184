"""What a real group of workers measures before it decides: its collectives, its backward pass.

All ranks take part and end with the same numbers: the slowest rank's times count, as everybody waits for it.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradwire.cost.network import KINDS, Kind, Line, Measured, line_through, sent_bytes
from gradwire.errors import ConfigurationError
from gradwire.wire import Pending, ProcessGroupTransport, Transport

SIZES = (1 << 10, 1 << 16, 1 << 19, 1 << 22, 1 << 24)
"""Payloads in bytes, of the whole collective on a worker."""

REPEATS = 5
SECONDS = 1.0
"""No larger size is tried after one that took so long."""


def measured(group: dist.ProcessGroup, device: torch.device, sizes: Sequence[int] = SIZES) -> Measured:
    """Times every collective of a group.

    Args:
        group: The workers; nothing else may use it meanwhile.
        device: Where payloads lie.
        sizes: Payloads to try, in bytes, the smallest first.

    Raises:
        ConfigurationError: If there is one worker only.
    """
    transport = ProcessGroupTransport(group)
    if transport.world_size < 2:
        raise ConfigurationError(
            "there is one worker, and no network to probe; start several with torchrun --nproc-per-node, or describe "
            "the network with --link and --workers"
        )
    return Measured(transport.world_size, {kind: _line(kind, transport, device, sizes) for kind in KINDS})


def _line(kind: Kind, transport: Transport, device: torch.device, sizes: Sequence[int]) -> Line:
    points: list[tuple[int, float]] = []
    works: list[tuple[int, float]] = []
    for size in sizes:
        whole = size // 4 // transport.world_size * transport.world_size * 4
        nbytes = max(whole, 4 * transport.world_size)
        payload = nbytes // transport.world_size // 4 * 4 if "gather" in kind else nbytes
        times, processor = [], []
        for _ in range(REPEATS):
            seconds, work = _once(kind, transport, torch.zeros(payload, dtype=torch.uint8, device=device))
            times.append(seconds)
            processor.append(work)
            if seconds > SECONDS:
                break
        sent = sent_bytes(kind, payload, transport.world_size)
        points.append((sent, min(times)))  # what else runs on the cores is no property of the network
        works.append((sent, statistics.median(processor)))
        if points[-1][1] > SECONDS:
            break
    return line_through(points, statistics.median(work / sent for sent, work in works[len(works) // 2 :] if sent))


def _once(kind: Kind, transport: Transport, payload: Tensor) -> tuple[float, float]:
    """The slowest rank's time of one collective, and the mean of all ranks' processor time."""
    together = torch.zeros(1, device=payload.device, dtype=torch.float32)
    transport.all_reduce(together, dist.ReduceOp.SUM)()
    processor, start = time.process_time(), time.perf_counter()
    _begin(kind, transport, payload)()
    if payload.is_cuda:
        torch.cuda.synchronize(payload.device)
    seconds, work = time.perf_counter() - start, time.process_time() - processor
    # float32 carries microseconds of a second; both are needed no better.
    seen = torch.tensor([seconds, work], device=payload.device, dtype=torch.float32)
    slowest = transport.all_reduce(seen.clone(), dist.ReduceOp.MAX)()
    mean = transport.all_reduce(seen, dist.ReduceOp.SUM)() / transport.world_size
    return float(slowest[0]), float(mean[1])


def _begin(kind: Kind, transport: Transport, payload: Tensor) -> Pending:
    match kind:
        case "all-reduce":
            return transport.all_reduce(payload.view(torch.float32), dist.ReduceOp.SUM)
        case "all-gather":
            return transport.all_gather(payload)
        case "straight all-gather":
            return transport.all_gather(payload, straight=True)
        case "all-to-all":
            return transport.all_to_all(payload.view(transport.world_size, -1))
        case "broadcast":
            return transport.broadcast(payload, 0)
    partner = transport.rank ^ 1
    return transport.exchange(payload, partner if partner < transport.world_size else transport.rank)


def core_share(seconds: float = 0.3) -> float:
    """The share of a core that a thread of this process gets when it never rests, with whatever else runs."""
    began, processor = time.perf_counter(), time.thread_time()
    while time.perf_counter() - began < seconds:
        pass
    return (time.thread_time() - processor) / (time.perf_counter() - began)


def arrivals(
    model: DistributedDataParallel,
    step: Callable[[nn.Module], Tensor],
    steps: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of backward until each bucket is ready, one after another, and of the rest of a step in front of them.

    The model's averages are left out, so it must not be used for training afterwards.

    Args:
        model: Freshly wrapped, without a communication hook.
        step: Gives the loss of a step.
        steps: How many are timed after two that are not.
        clock: What tells the time; ``time.thread_time`` where workers share cores and compute in one thread.

    Returns:
        The time before backward, then that of each bucket; medians over steps.
    """
    seen: list[float] = []

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        seen.append(clock())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)
    timed: list[list[float]] = []
    for number in range(2 + steps):
        model.zero_grad(set_to_none=True)
        seen.clear()
        began = clock()
        loss = step(model)
        seen.append(clock())
        loss.backward()  # type: ignore[no-untyped-call]
        if number >= 2:
            timed.append([later - earlier for earlier, later in zip([began, *seen], seen, strict=False)])
    return [statistics.median(times) for times in zip(*timed, strict=True)]


def agreed(content: Any, group: dist.ProcessGroup, device: torch.device) -> Any:
    """What rank 0 has, on all ranks: anything that JSON can say."""
    transport = ProcessGroupTransport(group)
    text = json.dumps(content).encode() if transport.rank == 0 else b""
    length = transport.broadcast(torch.tensor([len(text)], device=device), 0)()
    written = torch.zeros(int(length), dtype=torch.uint8)
    if transport.rank == 0:
        written = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return json.loads(bytes(transport.broadcast(written.to(device), 0)().cpu().tolist()))
