"""What a real group of workers measures before it decides: its collectives, its backward pass.

All ranks take part and end with the same numbers: the slowest rank's times count, as everybody waits for it.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradwire.cost.network import KINDS, Kind, Line, Measured, line_through, sent_bytes
from gradwire.cost.workload import Workload
from gradwire.errors import ConfigurationError
from gradwire.layout import Slot, flat_slots
from gradwire.wire import Pending, Transport

SIZES = (1 << 10, 1 << 16, 1 << 19, 1 << 22, 1 << 24)
"""Payloads in bytes, of the whole collective on a worker."""

REPEATS = 5
SECONDS = 1.0
"""No larger size is tried after one that took so long."""


def measured(transport: Transport, device: torch.device, sizes: Sequence[int], repeats: int = REPEATS) -> Measured:
    """Times every collective of a group.

    Args:
        transport: The workers; nothing else may use it meanwhile.
        device: Where payloads lie.
        sizes: Payloads to try, in bytes, the smallest first.
        repeats: How often each is tried.

    Raises:
        ConfigurationError: If there is one worker only.
    """
    if transport.world_size < 2:
        raise ConfigurationError(
            "there is one worker, and no network to probe; start several with torchrun --nproc-per-node, or describe "
            "the network with --link and --workers"
        )
    return Measured(transport.world_size, {kind: _line(kind, transport, device, sizes, repeats) for kind in KINDS})


def _line(kind: Kind, transport: Transport, device: torch.device, sizes: Sequence[int], repeats: int) -> Line:
    points: list[tuple[int, float]] = []
    works: list[tuple[int, float]] = []
    for size in sizes:
        whole = size // 4 // transport.world_size * transport.world_size * 4
        nbytes = max(whole, 4 * transport.world_size)
        payload = nbytes // transport.world_size // 4 * 4 if "gather" in kind else nbytes
        times, processor = [], []
        for _ in range(repeats):
            seconds, work = _once(kind, transport, torch.zeros(payload, dtype=torch.uint8, device=device))
            times.append(seconds)
            processor.append(work)
            if seconds > SECONDS:
                break
        sent = sent_bytes(kind, payload, transport.world_size)
        points.append((sent, statistics.median(times)))
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
        case "half all-reduce":
            return transport.all_reduce(payload.view(torch.bfloat16), dist.ReduceOp.SUM)
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


_CALL = (
    "the function that gives the loss has to call the model that it is given, as in model(batch): neither one of its "
    "methods, nor a model that it knows from elsewhere"
)


def arrivals(
    model: DistributedDataParallel,
    step: Callable[[nn.Module], Tensor],
    transport: Transport,
    steps: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> Workload:
    """What the workers compute in a step: DDP's own buckets, and how long backward takes to each.

    The model's averages are left out, so it must not be used for training afterwards.

    Args:
        model: Freshly wrapped, without a communication hook.
        step: Gives the loss of a step.
        transport: The workers, of whom the slowest counts.
        steps: How many are timed after two that are not.
        clock: What tells the time; ``time.thread_time`` where workers share cores and compute in one thread.

    Raises:
        ConfigurationError: If the step fails, or does not call the model that it is given.
    """
    seen: list[float] = []
    buckets: list[tuple[Slot, ...]] = []
    dtypes: list[torch.dtype] = []
    names = {id(parameter): name for name, parameter in model.module.named_parameters()}

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        seen.append(clock())
        dtypes.append(bucket.buffer().dtype)
        buckets.append(flat_slots([(names[id(each)], tuple(each.shape)) for each in bucket.parameters()]))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)
    timed: list[list[float]] = []
    for number in range(2 + steps):
        model.zero_grad(set_to_none=True)
        seen.clear()
        buckets.clear()
        began = clock()
        try:
            loss = step(model)
        except Exception as error:
            raise ConfigurationError(
                f"a step of the model in DistributedDataParallel failed: {type(error).__name__}: {error}; {_CALL}"
            ) from error
        seen.append(clock())
        loss.backward()  # type: ignore[no-untyped-call]
        if not buckets:
            raise ConfigurationError(f"a step left DistributedDataParallel nothing to average; {_CALL}")
        if number >= 2:
            timed.append([later - earlier for earlier, later in zip([began, *seen], seen, strict=False)])
    medians = [statistics.median(times) for times in zip(*timed, strict=True)]
    before, *works = largest(medians, transport, next(model.parameters()).device)
    return Workload(tuple(buckets), tuple(works), before, reduce(torch.promote_types, dtypes))


def largest(numbers: Sequence[float], transport: Transport, device: torch.device) -> list[float]:
    """The largest that any rank has of each number: of times the slowest worker's, for which everybody waits."""
    seen = torch.tensor(numbers, dtype=torch.float64, device=device)
    return [float(each) for each in transport.all_reduce(seen, dist.ReduceOp.MAX)().tolist()]


def agreed(content: Any, transport: Transport, device: torch.device) -> Any:
    """What rank 0 has, on all ranks: anything that JSON can say."""
    text = json.dumps(content).encode() if transport.rank == 0 else b""
    length = transport.broadcast(torch.tensor([len(text)], device=device), 0)()
    written = torch.zeros(int(length), dtype=torch.uint8)
    if transport.rank == 0:
        written = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return json.loads(bytes(transport.broadcast(written.to(device), 0)().cpu().tolist()))
