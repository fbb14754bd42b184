"""Trainings of one process side by side, each in a process of its own with one thread."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

import torch

from gradwire import own

Given = TypeVar("Given")
Found = TypeVar("Found")


@contextmanager
def abreast(
    work: Callable[[Given], Found], jobs: int
) -> Iterator[Callable[[Sequence[Given]], Iterator[tuple[Given, Future[Found]]]]]:
    """So many processes, which stay until the end of the block and then are gone, at once where an exception ends it.

    What it gives takes items, and yields each with what came of it, in the order of their ends. Where a process dies,
    as for lack of memory, nobody says over which item: those that it may have been are done again one by one, and the
    one that ends its process once more has a future that fails. The others are done as if nothing had happened.

    Args:
        work: What is done with an item; a function of a module, for it goes to other processes.
        jobs: How many.
    """
    others = set(multiprocessing.active_children())
    pool = _pool(jobs)

    def run(items: Sequence[Given]) -> Iterator[tuple[Given, Future[Found]]]:
        nonlocal pool
        alone = 0
        waiting = list(items)
        while waiting:
            part = waiting[:1] if alone else waiting
            going = {pool.submit(work, item): item for item in part}
            lost = []
            for future in as_completed(going):
                if isinstance(future.exception(), BrokenProcessPool) and len(part) > 1:
                    lost.append(going[future])
                else:
                    yield going[future], future
            if any(isinstance(future.exception(), BrokenProcessPool) for future in going):
                pool = _pool(jobs)
            waiting = [item for item in part if item in lost] + waiting[len(part) :]
            alone = jobs + 1 if lost else max(alone - 1, 0)

    try:
        yield run
    except BaseException:
        for each in set(multiprocessing.active_children()) - others:
            each.terminate()  # else the interpreter would wait at its end for what they are at
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _pool(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin)


def _begin() -> None:
    torch.set_num_threads(1)
    own.load()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Also where that was killed, and could tell nobody."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
