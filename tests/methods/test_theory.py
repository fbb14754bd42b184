"""What each method says of itself, held against what it does."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import pytest
import torch

import gradwire
from catalogue import OPTIONS
from gradwire import memory as memories
from gradwire import methods
from gradwire.codecs.codec import Codec
from gradwire.codecs.quantize import BUCKET, Quantiser
from gradwire.codecs.transform import Atoms
from gradwire.engine import Configuration, DensePolicy
from gradwire.kernels import codes
from gradwire.layout import Block, Granularity, flat_slots
from gradwire.local.laws import Law, SilentError, bound, class_as_declared, size
from gradwire.local.world import LocalWorld
from gradwire.memory import Residual, Store

SIDE = 64
VALUES = SIDE * SIDE
SCOPES = {"layer", "bucket", "model", "block"}

WRITTEN: list[tuple[str, dict[str, Any]]] = [
    *((name, options) for name in methods.names() for options in [{}, *OPTIONS.get(name, [])]),
    ("3lc", {"sparsity": 1.999}),
    *((name, {"rank": 100}) for name in ("powersgd", "acpsgd", "atomo")),
]
CASES = [*{repr(methods.get(name)(**options)): (name, options) for name, options in reversed(WRITTEN)}.values()][::-1]
"""Without options that are what is taken by default."""


def segment_of(method: methods.Method) -> int:
    """Values of a segment of these vectors."""
    return min(VALUES, Granularity.parse(method.granularities[0]).most)


def vectors() -> list[torch.Tensor]:
    """Gaussian, heavy-tailed, nearly sparse, and with one huge outlier."""
    generator = torch.Generator().manual_seed(3)
    gaussian = torch.randn(SIDE, SIDE, generator=generator)
    outlier = gaussian.clone()
    outlier[0, 0] = 1e4
    return [gaussian, gaussian**3, torch.where(gaussian.abs() > 2, gaussian, gaussian * 1e-4), outlier]


@pytest.mark.parametrize("name", methods.names())
def test_every_method_declares_what_it_is(name: str) -> None:
    kind = methods.get(name)
    assert kind.citation
    assert kind.wire_bits
    assert kind.bias in ("exact", "unbiased", "contractive", "biased")
    assert {each.partition(":")[0] for each in kind.granularities} == SCOPES or kind.why_granularity
    within = {type(each) for each in memories.parse(kind.memory).within if each != memories.NoMemory()}
    assert within <= {type(memories.parse(name)) for name in kind.memories}
    assert (kind.__doc__ or "").strip()


@pytest.mark.parametrize("name", methods.names())
def test_size_on_the_wire_is_as_declared(name: str) -> None:
    size(Configuration.make(name, {}))


@pytest.mark.parametrize("shape", [(1, 2000), (1000, 3), (33, 65), (7, 9)])
def test_size_of_odd_shapes_is_at_most_as_declared(shape: tuple[int, int]) -> None:
    """Words are filled up, and sizes of parts rounded."""
    for name in methods.names():
        method = methods.get(name)()
        if method.accepts(shape):
            bits = 8 * gradwire.roundtrip(torch.randn(shape), method, route=method.routes[0]).wire_bytes
            declared = method.declared_bits(*shape, learning=True)
            assert bits <= declared + 160, (name, bits, declared)


@pytest.mark.parametrize(
    ("name", "options"), [("greedylore", {}), ("gradiveq", {"slice": 64, "rank": 9, "learn_steps": 2})]
)
@pytest.mark.parametrize("shape", [(SIDE, SIDE), (33, 65)])
def test_size_once_it_has_learnt_is_as_declared(name: str, options: dict[str, Any], shape: tuple[int, int]) -> None:
    configuration = Configuration.make(name, options, dense=DensePolicy(below=0, vectors=False))
    world = LocalWorld(configuration, flat_slots([("matrix", shape)]), 2)
    written = [8 * world.average([torch.randn(*shape).flatten() for _ in range(2)]).written_bytes for _ in range(4)]
    method = configuration.method
    first, later = (method.declared_bits(*shape, learning=learning) for learning in (True, False))
    assert written[0] == first, written
    assert written[3] == later, written


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8])
def test_size_among_some_workers_is_as_declared(workers: int) -> None:
    """Where no share of an average is compressed again; how many rounds a method has may depend on their number."""
    for name in ("dense", "topk", "globalqsgd", "gtopk", "scalecom", "powersgd", "atomo"):
        options = {"ratio": 0.05} if name in ("topk", "gtopk", "scalecom") else {}
        configuration = Configuration.make(name, options, dense=DensePolicy(below=0, vectors=False))
        world = LocalWorld(configuration, flat_slots([("matrix", (SIDE, SIDE))]), workers)
        bits = 8 * world.average([torch.randn(VALUES) for _ in range(workers)]).written_bytes
        declared = configuration.method.declared_bits(SIDE, SIDE, workers)
        assert 0.9 * declared <= bits <= declared + 160, (name, bits, declared)


@pytest.mark.parametrize("law", [class_as_declared, bound, size])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_class_bound_and_size_are_as_declared(name: str, options: dict[str, Any], law: Law) -> None:
    with suppress(SilentError):
        law(Configuration.make(name, options))


def errors_of_many(
    vectors: list[torch.Tensor], method: methods.Method, workers: int, route: str, steps: int
) -> torch.Tensor:
    """Relative errors of each vector, a tensor of its own, in some steps: ``float32[steps, len(vectors)]``.

    All workers have the same gradient, and randomness of their own.
    """
    everything = DensePolicy(below=0, vectors=False)
    configuration = Configuration.make(method, {}, route=route, memory="none", dense=everything)
    assert len(vectors) == 1 or not configuration.granularity.joins
    slots = flat_slots([(f"matrix {number}", (SIDE, SIDE)) for number in range(len(vectors))])
    world, given = LocalWorld(configuration, slots, workers), torch.stack(vectors)
    found = []
    for _ in range(steps):
        gradients = [given.flatten().clone() for _ in range(workers)]
        world.average(gradients)
        error = gradients[0].view_as(given).double() - given
        found.append((error.square().sum((1, 2)) / given.double().square().sum((1, 2))).float())
    return torch.stack(found)


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, options) for name, options in CASES if methods.get(name).routes[0] == "sharded"],
    ids=str,
)
def test_error_of_many_workers_is_within_its_bound(name: str, options: dict[str, Any]) -> None:
    """Where owners compress averages again; the mean over 16 draws, with 5 standard errors of it allowed."""
    method = methods.get(name)(**options)
    bound = method.error_bound(segment_of(method))
    for errors in errors_of_many(vectors(), method, 4, "sharded", 16).T:
        allowance = 5 * errors.std() / math.sqrt(len(errors))
        assert errors.mean() <= bound * (1 + 1e-4) + allowance + 1e-9, (errors.mean(), bound)


@pytest.mark.parametrize("name", ["natural", "qsgd", "terngrad"])
def test_noise_falls_with_the_number_of_workers(name: str) -> None:
    """The way back adds at most half of what n workers' own draws leave, 1 / n of one worker's.

    Each is the mean over 8 draws of 4096 values, so within 10 % of what it is expected to be.
    """
    method, gaussian = methods.get(name)(), vectors()[:1]
    alone = errors_of_many(gaussian, method, 1, "gather", 8).mean()
    for workers in (2, 4, 8, 16):
        error = errors_of_many(gaussian, method, workers, method.routes[0], 8).mean()
        assert error <= 1.6 * alone / workers, (workers, error, alone)


def hard_vectors() -> list[torch.Tensor]:
    """Also a constant with some large values, which leave it far below half a level."""
    constant = torch.full((SIDE, SIDE), 1e-3)
    constant.view(-1)[::500] = 1
    return [*vectors(), constant]


def remembered(codec: Codec, vector: torch.Tensor, steps: int) -> torch.Tensor:
    """The residual after each of some steps in which the same vector came: ``float32[steps, VALUES]``."""
    block = Block.cut(flat_slots([("tensor", (SIDE, SIDE))]), Granularity("layer"))
    feedback = Residual().feedback(Store(torch.device("cpu")), "residual", block.slots, VALUES)
    payload = torch.empty(codec.payload_bytes(block), dtype=torch.uint8)
    found = []
    for step in range(steps):
        codec.encode(block, vector.flatten(), feedback, payload, step)
        found.append(feedback.buffer(vector).clone())
    return torch.stack(found)


@pytest.mark.parametrize("vector", hard_vectors(), ids=["gaussian", "heavy", "sparse", "outlier", "constant"])
def test_a_remainder_that_shrinks_stays_bounded(vector: torch.Tensor) -> None:
    """By ``f / (1 - f)`` of the largest value where a step leaves at most a share f, or of the norm on average."""
    for codec, share in (
        (Quantiser(codes.QSGD(4), BUCKET), 1 / 7),
        (Quantiser(codes.QSGD(8), BUCKET), 1 / 127),
        (Quantiser(codes.QSGD(2, nearest=True), BUCKET), 1 / 2),
        (Quantiser(codes.QSGD(4, nearest=True), BUCKET), 1 / 14),
    ):
        assert codec.remainder(VALUES) == "shrinks"
        assert remembered(codec, vector, 100).abs().max() <= share / (1 - share) * vector.abs().max() * (1 + 1e-4)
    for code, length in ((codes.QSGD(8, True), BUCKET), (codes.QSGD(4, True), 128)):
        codec = Quantiser(code, length)
        assert codec.remainder(VALUES) == "shrinks"
        share = math.sqrt(code.error_bound(length))
        norms = torch.linalg.vector_norm(remembered(codec, vector, 100), dim=1)
        assert norms.square().mean().sqrt() <= share / (1 - share) * vector.norm()


def test_a_remainder_that_does_not_shrink_piles_up() -> None:
    """To many times the vector, on some vector."""
    coarse = Quantiser(codes.QSGD(2), BUCKET)
    for codec in (coarse, Quantiser(codes.TernGrad()), Quantiser(codes.QSGD(4, True)), Atoms(2)):
        assert codec.remainder(VALUES) != "shrinks"
        assert max(float(remembered(codec, vector, 200)[-1].norm() / vector.norm()) for vector in hard_vectors()) > 5
