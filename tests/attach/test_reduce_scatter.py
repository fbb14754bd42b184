"""The reduce-scatter of FSDP2, compressed."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradwire
from gradwire import ConfigurationError
from pool import ranks
from sharded import Net, close, divided, everyone, hsdp, loss, parts, same, same_on_replicas, train

STEPS = range(3)
ALL_DENSE = gradwire.DensePolicy(below=1 << 30)
NO_DENSE = gradwire.DensePolicy(below=0, vectors=False)


@ranks(4)
def test_what_is_not_compressed_is_what_fsdp_reduces_itself() -> None:
    """Uneven shards, parts of one row, one dimension of the mesh and two."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    for arguments in ({"mesh": everyone()}, {}, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}):
        expected, model = train(hsdp(**arguments), STEPS), hsdp(**arguments)
        with closing(gradwire.compress_reduce_scatter(model, "qsgd", dense=ALL_DENSE)) as handle:
            assert close(train(model, STEPS), expected, 2e-2 if "mp_policy" in arguments else 1e-6)
            assert handle.stats().steps == len(STEPS)
            assert handle.stats().wire_bytes == handle.stats().dense_bytes * (2 if "mp_policy" in arguments else 1)


def gradients(model: Any) -> list[Tensor]:
    model.zero_grad()
    loss(model, 0).backward()
    return [each.grad.clone() for each in model.parameters()]


def whole(model: Any) -> list[Tensor]:
    return [each.full_tensor() for each in gradients(model)]


@ranks(4)
def test_sums_in_place_of_means() -> None:
    """As TorchTitan asks for, over shards alone, and with replicas that FSDP sums over or gradwire does."""
    for mesh, across in ((everyone(), False), (None, False), (None, True)):
        exact, model = whole(hsdp(mesh=mesh)), divided(hsdp(mesh=mesh), 0.5)
        with closing(gradwire.compress_reduce_scatter(model, "qsgd", dense=ALL_DENSE)):
            handle = gradwire.compress(model, "dense") if across else None
            found = whole(model)
            if handle:
                handle.close()
        assert close(found, [8 * each for each in exact])


@pytest.mark.parametrize(
    ("method", "options", "fewer"),
    [
        ("qsgd", {"bits": 8}, 3.3),
        ("qsgd", {"bits": 4}, 5.5),
        ("nuqsgd", {}, 5.5),
        ("sdp4bit", {}, 5.0),
        ("natural", {}, 3.0),
        ("terngrad", {}, 10.0),
        ("dithered", {"bits": 2}, 8.0),
    ],
)
@ranks(4)
def test_means_are_right_on_average(method: str, options: dict[str, Any], fewer: float) -> None:
    """The mean over many steps of one gradient is FSDP's own, and far fewer bytes are sent."""
    exact, model, rounds = whole(hsdp(mesh=everyone())), hsdp(mesh=everyone()), 60
    with closing(gradwire.compress_reduce_scatter(model, method, dense=NO_DENSE, **options)) as handle:
        found = [gradients(model) for _ in range(rounds)]
        assert handle.stats().ratio > fewer
    for number, expected in enumerate(exact):
        drawn = torch.stack([each[number] for each in found]).full_tensor()
        error = (drawn.mean(0) - expected).norm()
        spread = (drawn - expected).norm(dim=tuple(range(1, drawn.dim()))).square().mean().sqrt()
        assert error <= 2 * spread / rounds**0.5 + 1e-6 * expected.norm()


@ranks(4)
def test_what_is_said_to_reduce_over_shards_is_all_that_does() -> None:
    """In the refusal, and on the page."""
    taken, said = set(), ""
    for method in gradwire.methods.names():
        try:
            gradwire.compress_reduce_scatter(hsdp(mesh=everyone()), method).close()
            taken.add(method)
        except ConfigurationError as error:
            said = str(error) if method == "alq" else said
    page = Path(__file__).parents[2].joinpath("docs/fsdp.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| methods | without bias"))
    assert set(re.findall(r"\w+", said.partition("choose ")[2])) - {"or"} == taken
    assert set(re.findall(r"`(\w+)`", row)) == taken


@ranks(4)
def test_with_replicas_and_after_a_restart() -> None:
    """Replicas stay the same bits, whether FSDP averages over them or gradwire does, and a run that goes on, too."""
    schedule = {0: 8, 2: 4}
    for averaged in (False, True):
        model = hsdp()
        scatter = gradwire.compress_reduce_scatter(model, "qsgd", bits=schedule)
        across = gradwire.compress(model, "acpsgd", rank=2) if averaged else None
        train(model, STEPS)
        state, weights = scatter.state_dict(), [each.clone() for each in parts(model)]
        owed = across.state_dict() if across is not None else None
        found = train(model, range(3, 5))
        assert same_on_replicas(found)
        scatter.close()

        model = hsdp()
        with torch.no_grad():
            for part, weight in zip(parts(model), weights, strict=True):
                part.copy_(weight)
        again = gradwire.compress_reduce_scatter(model, "qsgd", bits=schedule)
        again.load_state_dict(state)
        if owed is not None:
            gradwire.compress(model, "acpsgd", rank=2).load_state_dict(owed)
        assert same(train(model, range(3, 5)), found)
        again.close()


@ranks(4)
def test_misuse_is_told() -> None:
    model = hsdp()
    for method, arguments in (("topk", {}), ("acpsgd", {}), ("signsgd", {}), ("alq", {})):
        with pytest.raises(ConfigurationError, match=r"cannot (reduce over shards|take route|carry)"):
            gradwire.compress_reduce_scatter(model, method, **arguments)
    with pytest.raises(ConfigurationError, match="inside=2 is for averages over replicas, and here everybody"):
        gradwire.compress_reduce_scatter(model, "qsgd", inside=2)
    with pytest.raises(ConfigurationError, match="did not go through fully_shard"):
        gradwire.compress_reduce_scatter(Net(), "qsgd")
    with closing(gradwire.compress_reduce_scatter(model, "qsgd")) as handle:
        with pytest.raises(ConfigurationError, match="has a reduce-scatter of its own already"):
            gradwire.compress_reduce_scatter(model, "qsgd")
        with pytest.raises(ConfigurationError, match="cannot reduce over shards"):
            handle.change("topk")
        with pytest.raises(ConfigurationError, match="cannot take the place of the one by which gradients were cut"):
            handle.change(granularity="layer")
        handle.change(bits=4)
        train(model, range(1))
        model.scaled = False  # a parameter that takes no part
        with pytest.raises(ConfigurationError, match="took no part in the loss"):
            train(model, range(1))


@ranks(4)
def test_models_in_another_order_are_told_apart_by_their_names() -> None:
    """On one rank of a mesh; those of the other shards hear of it."""
    models = {"actor": hsdp(mesh=everyone()), "critic": hsdp(mesh=everyone())}
    name = "critic" if dist.get_rank() == 2 else "actor"
    with pytest.raises(ConfigurationError, match="ranks differ: rank 0 has 'name=actor', rank 2 has 'name=critic'"):
        gradwire.compress_reduce_scatter(models[name], "qsgd", name=name)
    for each, model in models.items():
        gradwire.compress_reduce_scatter(model, "qsgd", name=each).close()
