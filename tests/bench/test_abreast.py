"""Work that is done side by side goes on where a process dies."""

import os
import signal
from concurrent.futures.process import BrokenProcessPool

from gradwire_bench.abreast import abreast


def _square(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 5:
        raise ValueError("five")
    return number * number


def test_an_item_that_ends_its_process_or_fails_ends_no_other() -> None:
    with abreast(_square, 2) as run:
        found = dict(run(range(8)))
        again = dict(run([1]))
    assert {number: future.result() for number, future in found.items() if number not in (3, 5)} == {
        number: number * number for number in range(8) if number not in (3, 5)
    }
    assert isinstance(found[3].exception(), BrokenProcessPool)
    assert isinstance(found[5].exception(), ValueError)
    assert again[1].result() == 1
