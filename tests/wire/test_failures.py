"""What becomes of the others when a worker is killed, stopped or raises."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import cut_off
import exits
from failures import EXIT, METHODS, STEPS, Ending, Injection, injections, serve
from gradwire.errors import WireError
from gradwire.wire import ProcessGroupTransport
from pool import FORKING, ranks

Run = Callable[[list[Injection]], list[list[Ending]]]

SECONDS = 600


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    ours, theirs = FORKING.Pipe()
    template = FORKING.Process(target=serve, args=(theirs,))
    template.start()

    def run_all(chosen: list[Injection]) -> list[list[Ending]]:
        ours.send((chosen, str(tmp_path_factory.mktemp("worlds"))))
        assert ours.poll(SECONDS + 5 * len(chosen))
        outcomes: list[list[Ending]] = ours.recv()
        return outcomes

    yield run_all
    template.kill()
    template.join()


def test_every_worker_ends_with_one_error_and_no_wrong_gradient(run: Run, request: pytest.FixtureRequest) -> None:
    """``--injections 100`` runs as many."""
    chosen = injections(request.config.getoption("--injections"), seed=1)
    references = sorted({each.undisturbed for each in chosen}, key=str)
    expected: dict[Injection, list[str]] = {}
    for reference, endings in zip(references, run(references), strict=True):
        assert all(ending.code == EXIT["done"] and len(ending.accepted) == STEPS for ending in endings), (
            reference,
            endings,
        )
        assert all(ending.accepted == endings[0].accepted for ending in endings), (reference, endings)
        expected[reference] = endings[0].accepted
    counts: Counter[str] = Counter()
    for injection, endings in zip(chosen, run(chosen), strict=True):
        counts[injection.act] += 1
        for rank, ending in enumerate(endings):
            accepted = expected[injection.undisturbed]
            assert ending.accepted == accepted[: len(ending.accepted)], ("wrong gradient", injection, rank)
            assert ending.code is not None, ("hang", injection, rank, ending)
            if rank == injection.victim and injection.act == "kill":
                assert ending.code == -9, (injection, ending)
                continue
            assert ending.code == EXIT["failed"], (injection, rank, ending)
            assert ending.failure is not None, (injection, rank)
            if rank == injection.victim and injection.act == "raise":
                assert ending.failure["type"] == "InjectedError", (injection, ending)
            else:
                check_error(ending.failure["type"], ending.failure["text"], (injection, rank))
                counts["timed out" if "no answer" in ending.failure["text"] else "closed"] += 1
    print(dict(counts))


def check_error(kind: str, text: str, where: object) -> None:
    assert kind == "WireError", (where, text)
    assert " with " in text, (where, text)
    assert " in step " in text, (where, text)
    assert "the process group's timeout of" in text, (where, text)
    assert "start all workers again" in text, (where, text)


def test_every_kind_of_injection_comes(request: pytest.FixtureRequest) -> None:
    chosen = injections(24, seed=1)
    assert {(each.act, each.where) for each in chosen} == {
        (act, where)
        for act in ("kill", "stop", "raise")
        for where in ("forward", "backward", "wire", "landing", "between")
    }
    assert {each.method for each in chosen} == set(range(len(METHODS)))


def test_a_program_ends_though_a_collective_hangs(tmp_path: Path) -> None:
    subprocess.run([sys.executable, exits.__file__, str(tmp_path)], check=True, timeout=SECONDS)
    assert json.loads((tmp_path / "codes.json").read_text()) == exits.ENDINGS
    signs = ["Exception in thread", "Exception ignored", "Fatal", "terminate"]
    for ending in exits.ENDINGS:
        said = (tmp_path / f"{ending}-0.txt").read_text()
        assert said.count("Traceback") == said.count("CutShortError: on purpose") == (ending == "raises"), said
        assert not any(sign in said for sign in signs), said


def test_who_is_cut_off_in_the_midst_of_a_transfer_hears_of_it(
    quick_python: Callable[..., str], tmp_path: Path
) -> None:
    subprocess.run([quick_python(), cut_off.__file__, str(tmp_path)], check=True, timeout=SECONDS)
    assert json.loads((tmp_path / "in-the-midst.json").read_text())
    assert (tmp_path / "ending.json").exists(), "hang"
    assert "the connection was closed" in json.loads((tmp_path / "ending.json").read_text())["text"]


@ranks(3)
def test_who_breaks_off_ends_what_others_wait_for_though_a_rank_is_gone() -> None:
    transport, rank = ProcessGroupTransport(dist.new_group()), dist.get_rank()
    payload = torch.ones(4, dtype=torch.uint8)
    transport.all_gather(payload)()
    if rank == 2:
        transport.close()
    dist.barrier()
    pending = transport.exchange(payload, 1) if rank == 0 else None
    dist.barrier()
    if rank == 1:
        transport.abort()
    if pending is not None:
        with pytest.raises(WireError):
            pending()
    dist.barrier()
    if rank != 2:
        transport.close()
    transport.abort()  # of what is closed nothing is under way
