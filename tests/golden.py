"""What every method wrote, averaged and remembered when its golden vectors were made: ``tests/golden/<method>.json``.

``python tests/golden.py`` makes all of them anew, ``python tests/golden.py topk dgc`` those of two methods; see
:func:`recorded` for what is in a file. Gradients are not stored: :func:`gradient` is a formula over integers.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from catalogue import Case, cases
from gradwire import methods
from gradwire.engine.configuration import Configuration
from gradwire.layout import Slot, flat_slots
from gradwire.local.world import LocalWorld
from gradwire.policy import DensePolicy
from gradwire.wire import Meter, Request, Transport, scheduler
from gradwire.wire.fusion import Flight, issue

FOLDER = Path(__file__).parent / "golden"
WORKERS = 3
STEPS = 3

LARGE = (("matrix", (44, 30)), ("filter", (6, 3, 3, 3)), ("vector", (35,)))
"""What every attachment averages: its payloads are hashed."""

SMALL = (("matrix", (6, 7)), ("vector", (5,)))
"""What every route of a method averages in one step as well: its payloads are stored byte by byte."""

ROUNDED = {
    "acpsgd": "matrix products",
    "atomo": "eigenvectors",
    "demo": "cosines and matrix products",
    "dion": "matrix products",
    "gradiveq": "eigenvectors",
    "greedylore": "eigenvectors and matrix products",
    "powersgd": "matrix products",
}
"""Methods whose last bits may differ between machines, and why: no hashes of these, but magnitudes of values.

Signs of eigenvectors may differ, too.
"""

TOLERANCE = 1e-4
"""How far their values may lie apart, as a share of the largest magnitude of the tensor."""

Record = dict[str, list[Any]]


def gradient(slots: Sequence[Slot], rank: int, step: int) -> Tensor:
    """A gradient with a heavy tail that any language can write down: exact in float32.

    Element ``i`` of the flat buffer takes 64 bits from SplitMix64 at state ``i + 2**32 * rank + 2**40 * step``. They
    are four 15-bit numbers ``a, b, c, d``, lowest first, and a 4-bit number ``e``, and the element is
    ``(a + b - c - d) * 2**(-16 - e % 8)``.
    """
    state = np.arange(slots[-1].stop, dtype=np.uint64) + np.uint64((rank << 32) + (step << 40))
    bits = state + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    a, b, c, d = ((bits >> np.uint64(15 * part) & np.uint64(0x7FFF)).astype(np.int64) for part in range(4))
    exponent = (bits >> np.uint64(60)).astype(np.int64) % 8
    return torch.from_numpy(np.ldexp((a + b - c - d).astype(np.float32), -16 - exponent).astype(np.float32))


@contextmanager
def noting() -> Iterator[list[list[tuple[str, Tensor]]]]:
    """What each rank asks of the wire within: kinds of requests, and payloads before answers are written to them."""
    asked: list[list[tuple[str, Tensor]]] = [[] for _ in range(WORKERS)]

    def issued(requests: Sequence[Request], transport: Transport, meter: Meter) -> Flight:
        asked[transport.rank] += [(type(each).__name__, each.payload.clone()) for each in requests]
        return issue(requests, transport, meter)

    with mock.patch.object(scheduler, "issue", issued):
        yield asked


def recorded(method: str) -> dict[str, Record]:
    """What is in a file: by attachment, then by what it is, hashes and some values.

    ``step 0 request 1 AllGather uint8[124]`` has the payload of each rank, ``step 0 average`` what all ranks end with,
    ``residual of rank 0`` what is remembered after the last step. A hash is 8 bytes of BLAKE2b, in hexadecimal; numbers
    are some of the tensor's values. Attachments named ``small`` have whole payloads in place of their hashes.
    """
    own = [case for case in cases(methods.get(method).memory) if case.method == method]
    usual = [case for case in own if (case.options, case.granularity) == (own[0].options, own[0].granularity)]
    rounded = method in ROUNDED
    found = {str(case): _record(case, LARGE, STEPS, rounded, whole=False) for case in own}
    return found | {f"small {case}": _record(case, SMALL, 1, rounded, whole=not rounded) for case in usual}


def _record(
    case: Case, shapes: Sequence[tuple[str, tuple[int, ...]]], steps: int, rounded: bool, whole: bool
) -> Record:
    everything = DensePolicy(below=0, vectors=False)
    choices = Configuration.make(
        case.method, case.options, case.granularity, case.route, case.memory, dense=everything, seed=7
    )
    slots = flat_slots(shapes)
    world = LocalWorld(choices, slots, WORKERS)
    record: Record = {}
    for step in range(steps):
        gradients = [gradient(slots, rank, step) for rank in range(WORKERS)]
        with noting() as asked:
            world.average(gradients)
        for number, requests in enumerate(zip(*asked, strict=True)):
            kind, payloads = requests[0][0], [payload for _, payload in requests]
            about = f"{str(payloads[0].dtype).removeprefix('torch.')}{list(payloads[0].shape)}"
            written = [_bytes(each).hex() if whole else _hash(each) for each in payloads]
            if rounded:
                written = _sample(torch.stack(payloads).abs()) if payloads[0].is_floating_point() else []
            record[f"step {step} request {number} {kind} {about}"] = written
        assert all(torch.equal(each, gradients[0]) for each in gradients if not each.isnan().any())
        record[f"step {step} average"] = _told(gradients[0], rounded)
    for rank in range(WORKERS):
        for field, tensors in sorted(world.engines[rank].store.state().items()):
            told = torch.cat([tensors[name].flatten() for name in sorted(tensors)])
            record[f"{field} of rank {rank}"] = _told(told, rounded)
    return record


def _told(tensor: Tensor, rounded: bool) -> list[Any]:
    return _sample(tensor.abs()) if rounded else [_hash(tensor), *_sample(tensor)]


def _sample(tensor: Tensor) -> list[float]:
    """Four values, evenly spaced, and the largest magnitude."""
    values = tensor.flatten().float()
    if not values.numel():
        return []
    places = torch.linspace(0, values.numel() - 1, 4).long()
    return [float(f"{value:.9g}") for value in [*values[places].tolist(), float(values.abs().max())]]


def _hash(tensor: Tensor) -> str:
    return hashlib.blake2b(_bytes(tensor), digest_size=8).hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def stored(method: str) -> dict[str, Record]:
    """The golden vectors of a method."""
    content: dict[str, Record] = json.loads((FOLDER / f"{method}.json").read_text())
    return content


def store(method: str) -> None:
    """Makes the golden vectors of a method anew: a line for each thing recorded, so that differences are local."""
    cases_of = []
    for case, record in recorded(method).items():
        lines = ",\n".join(f"  {json.dumps(what)}: {json.dumps(told)}" for what, told in record.items())
        cases_of.append(f" {json.dumps(case)}: {{\n{lines}\n }}")
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{method}.json").write_text("{\n" + ",\n".join(cases_of) + "\n}\n")


def differences(expected: dict[str, Record], found: dict[str, Record], rounded: bool) -> list[str]:
    """What is not as it was: attachment, and what of it, one line each."""
    told = [f"{case} is new" for case in found.keys() - expected.keys()]
    told += [f"{case} is gone" for case in expected.keys() - found.keys()]
    for case in sorted(expected.keys() & found.keys()):
        was, now = expected[case], found[case]
        told += [f"{case}: {what} is gone" for what in was if what not in now]
        told += [f"{case}: {what} is new" for what in now if what not in was]
        told += [
            f"{case}: {what} was {_short(was[what])}, is {_short(now[what])}"
            for what in was
            if what in now and not _same(was[what], now[what], TOLERANCE if rounded else 0.0)
        ]
    return told


def _same(was: list[Any], now: list[Any], tolerance: float) -> bool:
    if len(was) != len(now):
        return False
    largest = max((abs(value) for value in was if not isinstance(value, str)), default=0.0)
    return all(
        a == b if isinstance(a, str) or isinstance(b, str) else np.isclose(a, b, 0, tolerance * largest, equal_nan=True)
        for a, b in zip(was, now, strict=True)
    )


def _short(values: list[Any]) -> str:
    text = json.dumps(values)
    return text if len(text) <= 200 else f"{text[:200]}..."


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or methods.names():
        store(name)
        print(f"wrote {FOLDER / name}.json")
