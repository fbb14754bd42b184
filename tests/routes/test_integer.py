"""Integers that add up: kernels against their reference, sums that never carry, and who is refused."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradwire
from gradwire.engine.configuration import Configuration
from gradwire.errors import ConfigurationError
from gradwire.kernels import Compensated, cpu, reference
from gradwire.kernels.codes import Integers
from gradwire.layout import Block, flat_slots
from gradwire.local.world import LocalWorld
from gradwire.memory import Residual
from gradwire.routes import SharedLevels
from gradwire.wire.meter import all_reduce_bytes
from kernel_inputs import BLOCKS, KEY, blocks, covered, gradients, normal, residuals, same
from pool import Pool, ranks
from together import together

CODES = [(8, 0, 3), (4, 64, 2), (2, 0, 1), (8, 512, 5), (4, 104, 7)]


@blocks
@gradients
@together("turn", range(2))
def test_integers_are_the_reference(block: Block, gradient: Tensor, turn: int) -> None:
    bits, bucket, workers = CODES[(list(BLOCKS.values()).index(block) + 2 * turn) % len(CODES)]
    code = Integers(bits, SharedLevels(bits).levels_for(workers), workers)
    segments = block.divided(bucket) if bucket else block
    left, right, beta, gamma = residuals((0.9, 0.3) if turn else None)
    memories = {cpu: left, reference: right}
    results = []
    for kernels in (cpu, reference):
        memory = memories[kernels]
        scales = torch.full((segments.segment_count,), torch.nan)
        kernels.integer_scales(code, segments, Compensated(gradient, memory, beta, gamma), scales)
        values = gradient.clone() if memory is None else memory
        if turn:
            scales /= 3  # as clipped: what is beyond saturates
        codes = torch.full((block.positions * bits // 8,), 0x5A, dtype=torch.uint8)
        kernels.integer_encode(code, segments, values, memory is not None, scales, codes, KEY)
        out, norms = normal(1), torch.full((segments.segment_count,), torch.inf)
        kernels.integer_decode(code, segments, scales, codes * workers, out)
        kernels.euclidean_norms(segments, gradient, norms)
        results.append((scales, codes, values, out, norms))
    assert all(same(first, second) for first, second in zip(*results, strict=True))
    assert same(results[0][3][~covered(block)], normal(1)[~covered(block)])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_sums_of_the_highest_codes_do_not_carry(bits: int) -> None:
    for workers in range(1, 128):
        code = SharedLevels(bits)
        try:
            levels = code.levels_for(workers)
        except ConfigurationError:
            assert 2 * workers > (1 << bits) - 1
            continue
        assert 2 * levels * workers < 1 << bits


def test_too_many_workers_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match="room for 7 workers; choose bits=8"):
        SharedLevels(4).levels_for(8)
    with pytest.raises(ConfigurationError, match="room for 127 workers"):
        SharedLevels(8).levels_for(128)
    with pytest.raises(ConfigurationError, match="levels=8"):
        SharedLevels(4, levels=8)


def extremes(bits: int) -> None:
    """All workers have the largest magnitude everywhere: the sums are as large as they can be."""
    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    for sign in (1.0, -1.0):
        sync = gradwire.Synchronizer([("weight", parameter)], "globalqsgd", bits=bits)
        parameter.grad = torch.full((64, 64), sign * 3e38)
        sync.synchronize()
        torch.testing.assert_close(parameter.grad, torch.full((64, 64), sign * 3e38))
        sync.close()


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_sums_decode_to_the_largest_values(pool: Pool, workers: int, bits: int) -> None:
    pool.run(workers, extremes, bits)


@pytest.mark.parametrize("clip", [0.0, 2.5])
@ranks(3)
def test_terngrad_shares_its_scale_and_adds_up(clip: float) -> None:
    """What comes back is a whole number of n-th parts of the largest of the workers' bounds."""
    parameter = torch.nn.Parameter(torch.zeros(40, 100))
    sync = gradwire.Synchronizer([("weight", parameter)], "terngrad", clip=clip, route="allreduce")
    scale, workers = torch.zeros(()), dist.get_world_size()
    for rank in range(workers):
        gradient = torch.randn(40, 100, generator=torch.Generator().manual_seed(rank)) * (rank + 1)
        gradient[3, 7] = 50.0 * (-1) ** rank
        bound = clip * gradient.double().std(correction=0).float() if clip else torch.inf
        scale = torch.maximum(scale, gradient.abs().max().clamp(max=bound))
        parameter.grad = gradient if rank == dist.get_rank() else parameter.grad
    sync.synchronize()
    sync.close()
    counts = parameter.grad / scale * workers
    torch.testing.assert_close(counts, counts.round(), rtol=0, atol=1e-4)
    assert counts.abs().max() <= workers + 1e-3
    assert counts[3, 7].round() == workers % 2  # 50 and -50 are as far as the scale goes, with any draw


def test_terngrad_has_as_few_bits_as_sums_fit() -> None:
    """A step's bytes a worker, of 4,000 values and a scale, and who is too many."""
    for workers, bits in ((1, 2), (7, 4), (8, 8)):
        payloads = (4000 * bits // 8, 4)
        case = Configuration.make("terngrad", {}, route="allreduce")
        world = LocalWorld(case, flat_slots([("weight", (40, 100))]), workers)
        world.average([torch.ones(4000) for _ in range(workers)])
        assert world.engines[0].meter.wire_bytes == sum(all_reduce_bytes(each, workers) for each in payloads)
    with pytest.raises(ConfigurationError, match="room for 127 workers"):
        LocalWorld(Configuration.make("terngrad", {}, route="allreduce"), flat_slots([("weight", (40, 100))]), 128)
    Configuration.make("terngrad", {}, owner="qsgd:8")
    with pytest.raises(ConfigurationError, match="owner="):
        Configuration.make("terngrad", {}, route="allreduce", owner="qsgd:8")
    Configuration.make("terngrad", {}, route="allreduce", memory=Residual(beta=0.5, dtype="bfloat16"))


def test_averages_of_intsgd_are_integers_of_the_published_step() -> None:
    """Over n times ``sqrt(d) / sqrt(2 n r)``, at most ``n (127 // n)`` of them, with r of the averages so far."""
    workers, slots, square = 4, flat_slots([("weight", (64, 100))]), 0.0
    world = LocalWorld(Configuration.make("intsgd", {}), slots, workers)
    for step in range(5):
        generators = [torch.Generator().manual_seed(10 * step + rank) for rank in range(workers)]
        gradients = [torch.randn(6400, generator=each) + 0.5 for each in generators]
        for each in gradients:
            each[7] = 100.0 * (step == 3)
        world.average(gradients)
        average = gradients[0].double()
        if step:
            integers = average * workers * math.sqrt(6400 / (2 * workers * square))
            torch.testing.assert_close(integers, integers.round(), rtol=0, atol=1e-4)
            assert (int(integers[7].round()) == workers * (127 // workers)) == (step == 3)
        new = float(average.square().sum())
        square = 0.9 * square + 0.1 * new if step else new


@pytest.mark.parametrize("granularity", ["layer", "bucket", "model"])
def test_intsgd_forgets_an_average_of_which_a_step_would_be_beyond_float32(granularity: str) -> None:
    slots = flat_slots([("first", (40, 40)), ("second", (30, 50))])
    world = LocalWorld(Configuration.make("intsgd", {}, granularity), slots, 3)
    for step in range(12):
        sent = [torch.full((slots[-1].stop,), 1e37 if step == 0 else 0.1) for _ in range(3)]
        world.average(sent)
        assert sent[0].isfinite().all(), step
    assert 0.05 < float(sent[0].mean()) < 0.2
