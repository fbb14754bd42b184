"""Worker processes with a real gloo process group, kept alive across tests."""

from __future__ import annotations

import multiprocessing as mp
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 240


class WorkerError(AssertionError):
    """Something raised in a worker; carries its traceback."""


class Pool:
    """Runs functions on worlds of 1 to 5 processes; a world starts when it is first asked for."""

    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._worlds: dict[int, list[tuple[mp.process.BaseProcess, Connection]]] = {}
        self._started = 0

    def run(self, workers: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Calls a module-level function on every rank of a world and returns what each returned."""
        if workers not in self._worlds:
            self._worlds[workers] = self._start(workers)
        world = self._worlds[workers]
        for _, pipe in world:
            pipe.send((function, arguments))
        results, errors = [], []
        for rank, (_, pipe) in enumerate(world):
            if not pipe.poll(SECONDS if not errors else 5):
                self._end(workers)
                raise WorkerError("\n".join([f"rank {rank} of {workers} did not answer", *errors]))
            ok, result = pipe.recv()
            (results if ok else errors).append(result)
        if errors:
            self._end(workers)
            raise WorkerError("\n".join(errors))
        return results

    def close(self) -> None:
        """Ends all processes."""
        for workers in list(self._worlds):
            self._end(workers)

    def _end(self, workers: int) -> None:
        for process, _ in self._worlds.pop(workers):
            process.kill()
            process.join()

    def _start(self, workers: int) -> list[tuple[mp.process.BaseProcess, Connection]]:
        context = mp.get_context("spawn")
        self._started += 1
        world = []
        for rank in range(workers):
            ours, theirs = context.Pipe()
            arguments = (rank, workers, self._store.port, f"world-{self._started}", theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            world.append((process, ours))
        return world


def _serve(rank: int, workers: int, port: int, world: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    # Not a file's: whoever waits for a key there looks every few milliseconds, for every pair of every new group.
    store = dist.PrefixStore(world, dist.TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*arguments)))
        except Exception:
            pipe.send((False, f"rank {rank}: {traceback.format_exc()}"))
