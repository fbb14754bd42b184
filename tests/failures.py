"""Workers that are killed, stopped or raise at random points of a step, and what becomes of the others.

A template process imports everything and compiles the kernels once; worlds of workers are forked from it. Every worker
notes the gradients it accepted, and how it ended, in a file of its own.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.attach.rehearsal import rehearse
from gradwire.engine.configuration import Configuration
from gradwire.wire import Line, Pending

STEPS = 5
HANG_SECONDS = 90
STOPPED_TIMEOUT = 5
OTHER_TIMEOUT = 600
TOGETHER = 8
EXIT = {"done": 0, "failed": 7}

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("powersgd", {"rank": 2}),
    ("efsignsgd", {"route": "sharded"}),
    ("topk", {"ratio": 0.1, "granularity": "model"}),
    ("gtopk", {"ratio": 0.1}),
    ("scalecom", {"ratio": 0.1}),
    ("dense", {}),
]


class InjectedError(Exception):
    """Raised on purpose."""


@dataclass(frozen=True)
class Injection:
    """What happens to one worker of a world.

    Attributes:
        act: ``"kill"``, ``"stop"``, ``"raise"``, or ``"none"``.
        where: ``"forward"``, ``"backward"`` (when the gradient of layer ``point`` is there), ``"wire"`` (when the
            step's collective number ``point`` is issued), ``"landing"`` (when it is waited for) or ``"between"`` steps.
        step: In which step.
        point: Where exactly.
        victim: The worker.
        workers: How many there are.
        way: ``"ddp"`` or ``"synchronizer"``.
        method: Which of ``METHODS``.
    """

    act: str
    where: str
    step: int
    point: int
    victim: int
    workers: int
    way: str
    method: int

    @property
    def undisturbed(self) -> Injection:
        return replace(self, act="none", where="", step=0, point=0, victim=0)


@dataclass(frozen=True)
class Ending:
    """What one worker left behind: digests of accepted gradients, how it failed if it did, and its exit code."""

    accepted: list[str]
    failure: dict[str, Any] | None
    code: int | None


def configured(method: str, options: dict[str, Any]) -> Configuration:
    own = dict(options)
    return Configuration.make(method, own, own.pop("granularity", None), own.pop("route", None))


def injections(count: int, seed: int) -> list[Injection]:
    """Random injections; every act and place comes about equally often."""
    chance = random.Random(seed)
    acts, wheres = ["kill", "stop", "raise"], ["forward", "backward", "wire", "landing", "between"]
    found = []
    for number in range(count):
        workers, method = chance.choice([2, 3]), chance.randrange(len(METHODS))
        found.append(
            Injection(
                act=acts[number % 3],
                where=wheres[number % 5],
                step=chance.randrange(2, STEPS - 1),  # DDP itself sends in the first two
                point=chance.randrange(3),
                victim=chance.randrange(workers),
                workers=workers,
                way=["ddp", "synchronizer"][(workers + method) % 2],
                method=method,
            )
        )
    return found


def serve(pipe: Connection) -> None:
    """The template: rehearses all methods, then runs injections until it is killed."""
    import torch._dynamo  # DDP and the optimizers do so when they are first used, in seconds

    torch.set_num_threads(1)
    for method, options in METHODS:
        rehearse(configured(method, options))
    while True:
        chosen, folder = pipe.recv()
        outcomes: list[list[Ending]] = []
        for start in range(0, len(chosen), TOGETHER):
            outcomes += _run(chosen[start : start + TOGETHER], Path(folder), start)
        pipe.send(outcomes)


def _run(chosen: Sequence[Injection], folder: Path, number: int) -> list[list[Ending]]:
    """Forks the worlds of some injections at once, and waits until all their workers have ended."""
    running: dict[int, tuple[int, int]] = {}
    codes: dict[tuple[int, int], int] = {}
    for world, injection in enumerate(chosen):
        for rank in range(injection.workers):
            if not (process := os.fork()):
                _work(injection, rank, folder / f"{number + world}")
            running[process] = (world, rank)
    deadline = time.monotonic() + HANG_SECONDS
    while running and time.monotonic() < deadline:
        time.sleep(0.02)
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            codes[running.pop(process)] = os.waitstatus_to_exitcode(status)
        for left, (world, rank) in running.items():
            if chosen[world].act == "stop" and rank == chosen[world].victim:
                others = [other for other, _ in running.values()].count(world)
                if others == 1:
                    os.kill(left, signal.SIGCONT)  # it goes on alone, and has to find that out
    for process in running:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return [
        [_ending(folder / f"{number + world}-{rank}", codes.get((world, rank))) for rank in range(each.workers)]
        for world, each in enumerate(chosen)
    ]


def _ending(notes: Path, code: int | None) -> Ending:
    lines = notes.read_text().splitlines() if notes.exists() else []
    failures = [json.loads(line) for line in lines if line.startswith("{")]
    return Ending([line for line in lines if not line.startswith("{")], failures[0] if failures else None, code)


def _work(injection: Injection, rank: int, path: Path) -> None:
    """One worker; ends as a process that was forked does, without taking down what the template has set up."""
    notes = os.open(f"{path}-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    code = EXIT["done"]
    try:
        _train(injection, rank, path, lambda text: os.write(notes, f"{text}\n".encode()))
    except Exception as error:
        os.write(notes, (json.dumps({"type": type(error).__name__, "text": str(error)}) + "\n").encode())
        code = EXIT["failed"]
    atexit._run_exitfuncs()
    os._exit(code)


def _train(injection: Injection, rank: int, path: Path, note: Callable[[str], object]) -> None:
    mine = injection.act if rank == injection.victim else "none"
    dist.init_process_group("gloo", init_method=f"file://{path}-rendezvous", rank=rank, world_size=injection.workers)
    # Only the group that is to fail has a short timeout: forked workers of a busy machine may start far apart.
    limit = STOPPED_TIMEOUT if injection.act == "stop" else OTHER_TIMEOUT
    group = dist.new_group(timeout=timedelta(seconds=limit))
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 30))
    method, options = METHODS[injection.method]
    step = 0

    def here(where: str, point: int) -> None:
        if where == injection.where and step == injection.step and point == injection.point:
            act(mine)

    sync: gradwire.Synchronizer | None = None
    model: nn.Module = net
    if injection.way == "ddp":
        assert isinstance(group, dist.ProcessGroup)
        wrapped = DistributedDataParallel(net, bucket_cap_mb=0.006, process_group=group)
        handle = gradwire.compress(wrapped, method, fuse_bytes=500, **options)
        model = wrapped
    else:
        handle = sync = gradwire.Synchronizer(
            net.named_parameters(), method, process_group=group, fuse_bytes=500, **options
        )
    scheduler = handle.wire._scheduler
    collectives = Interrupted(scheduler._transport, here)
    scheduler._transport = collectives
    layers = [net[4], net[2], net[0]]
    for point, layer in enumerate(layers):
        layer.weight.register_hook(lambda gradient, point=point: here("backward", point))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

    def average() -> None:
        generator = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(8, 32, generator=generator)).square().mean().backward()
        if sync is not None:
            sync.synchronize()

    try:
        while step < STEPS:
            here("forward", injection.point)
            collectives.calls = 0
            average()
            note(digest([parameter.grad for parameter in net.parameters() if parameter.grad is not None]))
            optimizer.step()
            if injection.where in ("wire", "landing") and collectives.calls <= injection.point:
                here(injection.where, injection.point)  # the step has fewer collectives
            here("between", injection.point)
            step += 1
    except gradwire.GradwireError as error:
        check_aftermath(average, handle)
        raise error


def act(what: str) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "raise":
        raise InjectedError("on purpose")


def check_aftermath(average: Callable[[], None], handle: gradwire.Handle) -> None:
    """After a failure every use says so at once, and the handle's thread is gone."""
    with pytest.raises(gradwire.GradwireError, match="an earlier step failed"):
        average()
    handle.wire._thread.join(10)
    assert not any(thread.name == "gradwire" for thread in threading.enumerate())
    handle.close()
    handle.close()


def digest(tensors: Sequence[Tensor]) -> str:
    return hashlib.blake2b(torch.cat([tensor.reshape(-1) for tensor in tensors]).numpy().tobytes()).hexdigest()[:32]


class Interrupted:
    """A transport that tells when the step's collectives are issued and waited for."""

    def __init__(self, inner: Line, tell: Callable[[str, int], None]) -> None:
        self._inner = inner
        self._tell = tell
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.calls = 0

    def __getattr__(self, name: str) -> Callable[..., Pending]:
        collective = getattr(self._inner, name)

        def call(*arguments: Any) -> Pending:
            number, self.calls = self.calls, self.calls + 1
            self._tell("wire", number)
            pending = collective(*arguments)

            def wait() -> Tensor:
                self._tell("landing", number)
                return pending()

            return wait

        return call
