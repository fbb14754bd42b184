"""Worker processes with a real gloo process group, kept alive across tests."""

from __future__ import annotations

import inspect
import multiprocessing as mp
import os
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

SECONDS = 900
"""Until a world counts as hung: where no kernel is on the disk yet, one test may have those of all methods compiled."""

FORKING = mp.get_context("forkserver")
"""Begins processes as copies of one that has imported what takes seconds: Numba, and what DDP and optimizers import."""

OURS = ("gradwire.attach", "pytest", "torch._dynamo", "torch.distributed.fsdp")
FORKING.set_forkserver_preload(["gradwire.kernels.cpu", *OURS, "numba_ready"])


def copied(*modules: str) -> None:
    """Has processes begin as copies of one that has imported these modules with the environment of now.

    What they were copied from before is let go of: it ends with the last of its copies, and stopping it would wait for
    them.
    """
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_pid = server._forkserver_alive_fd = server._forkserver_address = None
    FORKING.set_forkserver_preload(["gradwire.kernels.cpu", *modules, "numba_ready"])


class WorkerError(AssertionError):
    """Something raised in a worker; carries its traceback."""


class Pool:
    """Runs functions on worlds of 1 to 5 processes.

    A process starts when a world first needs it, and worlds of any size are made of the same ones: what they have
    imported and compiled serves all.

    Args:
        environment: Variables of the processes; of this one's they have those that the first pool of all found.
    """

    def __init__(self, **environment: str) -> None:
        self._environment = environment
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[tuple[mp.process.BaseProcess, Connection]] = []
        self._worlds = 0
        self._workers = 0

    def run(self, workers: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls a module-level function on every rank of a world and returns what each returned."""
        if workers != self._workers:
            self._workers = workers
            self._worlds += 1
        while len(self._processes) < workers:
            self._processes.append(self._start(len(self._processes)))
        world = self._processes[:workers]
        for _, pipe in world:
            pipe.send((self._worlds, workers, function, arguments))
        results, errors = [], []
        for rank, (_, pipe) in enumerate(world):
            if not pipe.poll(SECONDS if not errors else 5):
                told = [other.recv() for _, other in world[rank + 1 :] if other.poll()]
                errors += [error for ok, error in told if not ok]
                self.close()
                raise WorkerError("\n".join([f"rank {rank} of {workers} did not answer", *errors]))
            ok, result = pipe.recv()
            (results if ok else errors).append(result)
        if errors:
            self.close()
            raise WorkerError("\n".join(errors))
        return results

    def close(self) -> None:
        """Ends all processes."""
        for process, _ in self._processes:
            process.kill()
            process.join()
        self._processes, self._workers = [], 0

    def _start(self, rank: int) -> tuple[mp.process.BaseProcess, Connection]:
        ours, theirs = FORKING.Pipe()
        process = FORKING.Process(target=_serve, args=(rank, self._store.port, theirs, self._environment), daemon=True)
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # what is not found is not preloaded
            process.start()
        return process, ours


def ranks(workers: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test whose body runs on every rank of a world."""

    def everywhere(body: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(body)

        @wraps(body)
        def test(pool: Pool, **given: Any) -> None:
            pool.run(workers, test, *(given[name] for name in signature.parameters))

        test.body = body  # type: ignore[attr-defined]
        fixture = inspect.Parameter("pool", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = signature.replace(parameters=[fixture, *signature.parameters.values()])  # type: ignore[attr-defined]
        return test

    return everywhere


def _serve(rank: int, port: int, pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    # A store in a file would have every pair of every new group look for its keys every few milliseconds.
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    current = 0
    while True:
        try:
            world, workers, function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if world != current:
                if dist.is_initialized():
                    dist.destroy_process_group()
                current = world
                names = dist.PrefixStore(f"world-{world}", store)
                dist.init_process_group("gloo", store=names, rank=rank, world_size=workers)
            torch.manual_seed(0)  # all ranks make the same model
            pipe.send((True, getattr(function, "body", function)(*arguments)))  # of a test of ranks, what they run
        except BaseException:  # what pytest fails by is no Exception
            pipe.send((False, f"rank {rank}: {traceback.format_exc()}"))
