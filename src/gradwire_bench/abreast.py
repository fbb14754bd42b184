"""Trainings of one process side by side, each in a process of its own with one thread."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeVar

import torch

Given = TypeVar("Given")
Found = TypeVar("Found")


@contextmanager
def abreast(
    work: Callable[[Given], Found], jobs: int
) -> Iterator[Callable[[Sequence[Given]], Iterator[tuple[Given, Future[Found]]]]]:
    """So many processes, which stay until the end of the block and then are gone.

    What it gives takes items, and yields each with what came of it, in the order of their ends; of a process that died
    the future tells.

    Args:
        work: What is done with an item; a function of a module, for it goes to other processes.
        jobs: How many.
    """
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _one_thread)

    def run(items: Sequence[Given]) -> Iterator[tuple[Given, Future[Found]]]:
        going = {pool.submit(work, item): item for item in items}
        for future in as_completed(going):
            yield going[future], future

    try:
        yield run
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _one_thread() -> None:
    torch.set_num_threads(1)
