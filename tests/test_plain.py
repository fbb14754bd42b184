"""A number is the same configuration whatever library it came from."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire import ConfigurationError, DensePolicy, lab, memory, methods
from gradwire.codecs.quantize import Quantiser
from gradwire.codecs.select import TopMagnitudes
from gradwire.codecs.sketch import CountSketch
from gradwire.codecs.transform import Levels
from gradwire.engine.choices import Choices
from gradwire.engine.configuration import Configuration
from gradwire.engine.guarding import Guarding
from gradwire.engine.schedule import stages
from gradwire.kernels import codes
from gradwire.local_sgd.schedule import Schedule
from gradwire.plain import plain
from local_training import network, train
from models import flat
from pool import ranks


class Whole:
    """Has ``__index__`` and nothing else."""

    def __repr__(self) -> str:
        return "Whole()"  # the same in every process, as names of tests must be

    def __index__(self) -> int:
        return 8


WHOLE = [np.int64, np.uint8, np.array, torch.tensor]
SHARES = [np.float64, np.float16, np.array, torch.tensor]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        *((kind(8), 8) for kind in WHOLE),
        *((kind(0.5), 0.5) for kind in SHARES),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.True_, True),
        (Whole(), 8),
        ((np.float64(0.5), np.int8(3)), (0.5, 3)),
        (codes.QSGD(np.int64(4)), codes.QSGD(4)),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_a_number_is_python_s_own(given: Any, found: Any) -> None:
    assert (plain(given), type(plain(given)), repr(plain(given))) == (found, type(found), repr(found))


@pytest.mark.parametrize("given", [8, 0.5, True, None, "8", (1, "a"), np.arange(3), torch.ones(1), np.int64, len])
def test_all_else_is_left_as_it_is(given: Any) -> None:
    assert plain(given) is given


def of_numpy(value: Any) -> Any:
    """A number as NumPy has it."""
    kinds: dict[type, Callable[[Any], Any]] = {int: np.int64, float: np.float64, bool: np.bool_}
    return kinds.get(type(value), lambda given: given)(value)


def fields_of(made: Any) -> dict[str, Any]:
    return {field.name: getattr(made, field.name) for field in dataclasses.fields(made) if field.init}


SCHEDULE = Schedule(8, 2, "layers", 1, 0.5, False, 3, "keep")
MADE = [
    SCHEDULE,
    Choices(seed=3, fuse_bytes=9, audit_every=5, verify_every=7, start=2, inside=4, rollback=True),
    DensePolicy(below=10, vectors=False),
    memory.Residual(beta=0.5, gamma=2.0),
    memory.Momentum(decay=0.5, nesterov=True),
    memory.LowPass(),
    memory.Diana(),
    Quantiser(codes.QSGD(4), 512),
    TopMagnitudes(0.25),
    Levels(grain=20, overflow=0.25),
    CountSketch(rows=3, columns=2.0),
    *(methods.get(name)() for name in methods.names()),
]


@pytest.mark.parametrize("made", MADE, ids=lambda made: type(made).__name__)
def test_what_is_made_of_numpy_s_numbers_is_the_same(made: Any) -> None:
    given = {name: of_numpy(value) for name, value in fields_of(made).items()}
    other = type(made)(**given)
    assert (other, repr(other)) == (made, repr(made))
    if isinstance(made, methods.Method):
        other = methods.make(methods.name_of(made), given)
        assert (other, repr(other)) == (made, repr(made))


def test_rounded_numbers_are_told_from_exact_ones() -> None:
    """As text NumPy has both as 0.1, and ranks that have one each would not be told that they differ."""
    method = methods.get("topk")(ratio=np.float32(0.1))  # type: ignore[call-arg]
    assert Configuration.of(method, {}, Choices()).describe()["ratio"] == str(float(np.float32(0.1))) != "0.1"


def test_choices_are_checked_as_python_s_own() -> None:
    choices = Choices(seed=np.int64(1), audit_every=np.int64(5), verify_every=np.int64(7))  # type: ignore[arg-type]
    Guarding(choices)
    assert Configuration.of("qsgd", {"bits": np.int64(4)}, choices).describe()["seed"] == "1"
    assert stages({"ratio": {np.int64(0): 0.5, np.int64(9): 0.1}}) == stages({"ratio": {0: 0.5, 9: 0.1}})


def test_periods_may_be_given_by_a_function_of_numpy_s() -> None:
    assert repr(dataclasses.replace(SCHEDULE, every=lambda period: np.int64(8)).length(0)) == "8"  # type: ignore
    with pytest.raises(ConfigurationError, match=r"every=8\.0 is out of range; choose a whole number"):
        dataclasses.replace(SCHEDULE, every=np.float32(8))  # type: ignore[arg-type]


def test_workers() -> None:
    opened = lab.Lab(workers=np.int64(4), rate="1gbit", sites=np.int64(2), between="1gbit")  # type: ignore[arg-type]
    assert opened.sites is not None
    assert repr((opened.workers, opened.sites.count)) == "(4, 2)"


@ranks(2)
def test_ranks_may_have_either() -> None:
    kind = np.int64 if dist.get_rank() else int
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    handle = gradwire.periodic(optimizer, every=kind(2), fragments=kind(2), method="qsgd", bits=kind(4), seed=kind(1))
    train(net, optimizer, range(4))
    handle.synchronize()
    file = io.BytesIO()
    torch.save(handle.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    handle.load_state_dict(gradwire.redistribute(_gathered(state), workers=kind(2))[dist.get_rank()])
    assert flat(net).isfinite().all()
    handle.close()


def _gathered(state: dict[str, Any]) -> list[Any]:
    states: list[Any] = [None, None]
    dist.all_gather_object(states, state)
    return states
