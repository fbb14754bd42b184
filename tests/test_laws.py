"""Laws over every method in the catalogue, on real processes."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist

import gradwire
from catalogue import Case, cases
from gradwire import methods
from gradwire.layout import ALIGNMENT, shard_bounds
from pool import Pool

SHAPES = {"conv": (16, 8, 3, 3), "linear": (40, 67), "bias": (40,), "tall": (300, 9), "odd": (1031,), "scalar": ()}


def parameters() -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in SHAPES.items()]


def gradient(name: str, rank: int, step: int) -> torch.Tensor:
    seed = sum(map(ord, name)) * 1000 + rank * 100 + step
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


# A collective that adds in half precision rounds each sum, which no worker can see.
ROUNDING = {"fp16": 2**-10, "bf16": 2**-7}


def digest(named: list[tuple[str, torch.nn.Parameter]]) -> bytes:
    return hashlib.sha256(b"".join(each.grad.numpy().tobytes() for _, each in named if each.grad is not None)).digest()


def check_same(digests: list[dict[str, list[bytes]]]) -> None:
    """Of all ranks, by case: one for each step."""
    first, *others = digests
    for other in others:
        assert other.keys() == first.keys()
        for case, expected in first.items():
            assert other[case] == expected, case


def conserve(case: Case, workers: int, steps: int) -> list[bytes]:
    """Nothing is lost: what was applied plus what is remembered equals what was put in, at every step."""
    rank = dist.get_rank()
    named = parameters()
    digests = []
    sync = gradwire.Synchronizer(named, case.method, **case.arguments)
    total_in = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    total_out = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(steps):
        for name, parameter in named:
            parameter.grad = gradient(name, rank, step)
            for other in range(workers):
                total_in[name] += gradient(name, other, step).double() / workers
        sync.synchronize()
        digests.append(digest(named))
        for name, parameter in named:
            assert parameter.grad is not None
            total_out[name] += parameter.grad.double()
    remembered = sync.state_dict()["tensors"]
    for name in SHAPES:
        owed = torch.zeros(SHAPES[name], dtype=torch.float64)
        if name in remembered.get("residual", {}):
            owed += remembered["residual"][name].double() / workers
        total = owed.clone()
        dist.all_reduce(total)
        total += owed_by_owners(case, remembered.get("owner_residual", {}).get(name), SHAPES[name], workers)
        scale = 1 + max(values[name].abs().max().item() for values in (total_in, total_out)) + total.abs().max().item()
        off = (total_out[name] + total - total_in[name]).abs().max().item()
        assert off < ROUNDING.get(case.method, 1e-5) * scale, (str(case), name, off)
    sync.close()
    return digests


def owed_by_owners(case: Case, mine: torch.Tensor | None, shape: tuple[int, ...], workers: int) -> torch.Tensor:
    """What owners did not send: each its own shard, or, where payloads are gathered, all of them the same."""
    owed = torch.zeros(shape, dtype=torch.float64)
    if mine is not None and case.route == "gather":
        owed.copy_(mine).div_(workers)
    elif mine is not None:
        size = int(case.granularity.partition(":")[2] or ALIGNMENT)
        low, high = shard_bounds(owed.numel(), dist.get_rank(), workers, size)
        owed.view(-1)[low:high] = mine
    dist.all_reduce(owed)
    return owed


def conserve_all(chosen: list[Case], workers: int) -> dict[str, list[bytes]]:
    return {str(case): conserve(case, workers, steps=4) for case in chosen}


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_average_plus_residual_is_the_mean_of_what_was_put_in(pool: Pool, workers: int) -> None:
    """And it is the same on every rank. Each world takes a third of the attachments; 1, 2 and 3 together take all."""
    check_same(pool.run(workers, conserve_all, cases("residual")[workers % 3 :: 3], workers))


def average_thrice(chosen: list[Case]) -> dict[str, list[bytes]]:
    digests: dict[str, list[bytes]] = {}
    for case in chosen:
        named = parameters()
        sync = gradwire.Synchronizer(named, case.method, **case.arguments)
        for step in range(3):
            for name, parameter in named:
                parameter.grad = gradient(name, dist.get_rank(), step)
            sync.synchronize()
            digests.setdefault(str(case), []).append(digest(named))
        sync.close()
    return digests


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_every_rank_has_the_same_bits(pool: Pool, workers: int) -> None:
    """A third of the attachments in each world; those with error feedback are compared above."""
    others = [case for case in cases() if case.memory != "residual"]
    check_same(pool.run(workers, average_thrice, others[workers % 3 :: 3]))


BAD = {1: float("inf"), 3: float("nan")}
"""Steps in which one value of every parameter is bad on one rank."""


def pass_on_non_finite(chosen: list[Case]) -> None:
    rank = dist.get_rank()
    for case in chosen:
        named = parameters()
        sync = gradwire.Synchronizer(named, case.method, **case.arguments)
        for step in range(5):
            for name, parameter in named:
                parameter.grad = gradient(name, rank, step)
                if step in BAD and rank == 1 and parameter.grad.dim():
                    parameter.grad.view(-1)[-1] = BAD[step]
            sync.synchronize()
            finite = {name: bool(each.grad.isfinite().all()) for name, each in named if each.grad is not None}
            if step not in BAD:
                assert all(finite.values()), (str(case), finite, step)
            elif case.granularity == "layer":
                assert not any(finite[name] for name, each in named if each.dim()), (str(case), finite, step)
            else:  # one segment holds them all, and it is enough that the step is seen to be bad
                assert not all(finite.values()), (str(case), finite, step)
        for field, tensors in sync.state_dict()["tensors"].items():
            for name, tensor in tensors.items():
                assert tensor.isfinite().all(), (str(case), field, name)
        sync.close()


def test_a_gradient_that_is_not_finite_reaches_every_rank_and_no_memory(pool: Pool) -> None:
    usual = [case for case in cases() if case.granularity == methods.get(case.method).granularities[0]]
    pool.run(2, pass_on_non_finite, usual)


VECTOR = torch.randn(4001, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("options", [{"bits": 2}, {"bits": 4}, {"bits": 8}, {"bits": 4, "norm": "l2"}], ids=str)
def test_qsgd_is_unbiased(options: dict[str, object]) -> None:
    check_unbiased("qsgd", **options)


def test_randomk_without_memory_is_unbiased() -> None:
    check_unbiased("randomk", memory="none", ratio=0.05)


def check_unbiased(method: str, **options: object) -> None:
    """Against the standard error of the mean of 400 draws, pooled over 4,001 elements.

    The error along the vector itself is within 5 standard errors (chance of a false alarm below 1e-6). The squared
    error of the mean is within 25 % of the variance of the mean: a bias would add 400 times its square.
    """
    draws = torch.stack([gradwire.roundtrip(VECTOR, method, step=step, **options).decoded for step in range(400)])
    error = (draws.mean(0) - VECTOR).double()
    variance = draws.double().var(0) / 400
    along = (error * VECTOR).sum().abs()
    assert along <= 5 * (variance * VECTOR.square()).sum().sqrt()
    assert 0.75 <= error.square().sum() / variance.sum() <= 1.25


def test_topk_is_contractive_and_exact() -> None:
    decoded = gradwire.roundtrip(VECTOR, "topk", ratio=0.1).decoded
    kept = round(0.1 * VECTOR.numel())
    assert int((decoded != 0).sum()) == kept
    assert torch.equal(decoded[decoded != 0], VECTOR[decoded != 0])
    left = (VECTOR - decoded).square().sum()
    assert left <= (1 - kept / VECTOR.numel()) * VECTOR.square().sum()
    assert (VECTOR - decoded).abs().max() <= decoded[decoded != 0].abs().min()


def test_sign_is_contractive_with_its_own_constant() -> None:
    decoded = gradwire.roundtrip(VECTOR, "efsignsgd").decoded
    delta = VECTOR.abs().sum().square() / (VECTOR.numel() * VECTOR.square().sum())
    left = (VECTOR - decoded).square().sum()
    torch.testing.assert_close(left, (1 - delta) * VECTOR.square().sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("dense", {}, 4 * 1000),
        ("fp16", {}, 2 * 1000),
        ("bf16", {}, 2 * 1000),
        ("efsignsgd", {}, 1000 // 8 + 3 + 4),
        ("qsgd", {"bits": 2, "bucket": 128}, 1000 // 4 + 2 + 8 * 4),
        ("qsgd", {"bits": 4}, 1000 // 2 + 2 * 4),
        ("qsgd", {"bits": 8}, 1000 + 2 * 4),
        ("topk", {"ratio": 0.1, "indices": "raw"}, 100 * 8),
        ("topk", {"ratio": 0.1, "values": "fp16", "indices": "raw"}, 100 * 6),
        ("randomk", {"ratio": 0.1}, 100 * 4),
    ],
)
def test_wire_size_is_exact(method: str, options: dict[str, object], expected: int) -> None:
    size = gradwire.roundtrip(torch.randn(1000), method, **options).wire_bytes
    assert expected - 3 <= size <= expected + 3, "payloads are whole multiples of 4 bytes"
    assert size % 4 == 0


@pytest.mark.parametrize(("method", "factor"), [("acpsgd", (40,)), ("powersgd", (40, 60))])
def test_low_rank_wire_size_is_that_of_its_factors(method: str, factor: tuple[int, ...]) -> None:
    size = gradwire.roundtrip(torch.randn(40, 60), method, rank=3).wire_bytes
    assert size == 4 * 3 * sum(factor)


def test_elias_fano_needs_at_most_two_bits_above_the_log() -> None:
    size = gradwire.roundtrip(torch.randn(1_000_000), "topk", ratio=0.01, values="fp16").wire_bytes
    assert 8 * size / 10_000 <= 16 + 2 + 6.65


@pytest.mark.parametrize("shape", [(1,), (), (7,), (1, 1), (3, 1), (1, 5), (2, 2)], ids=str)
@pytest.mark.parametrize("name", methods.names())
def test_tiny_tensors_come_back(name: str, shape: tuple[int, ...]) -> None:
    for value in (0.0, -0.0, 1e-42, 3e38, -1.5):
        tensor = torch.full(shape, value)
        back = gradwire.roundtrip(tensor, name)
        assert back.decoded.shape == tensor.shape
        overflows = name == "fp16" or (name == "demo" and value == 3e38)  # which adds up values in its transform
        assert back.decoded.isfinite().all() or overflows, (name, value)
