"""Dead-zone levels: Numba against the reference, the codes, the room, and bytes that no encoder writes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import codec_checks
from fuzz import HEAD, made
from gradwire.codecs.quantize import DeadZone, Dithered
from gradwire.codecs.quantize.deadzone import steps_of
from gradwire.errors import ConfigurationError
from gradwire.kernels import cpu, reference
from gradwire.kernels.reference import deadzone_payload_bytes, deadzone_room
from gradwire.kernels.reference.deadzone import LARGEST, LIMIT, first_of
from gradwire.kernels.reference.deadzone_codes import CONTEXTS, ESCAPE, LONGEST, codes
from gradwire.kernels.reference.deadzone_step import FEW, TURNS, chunks_sampled, few_of, index_of, sampling, step_of
from gradwire.layout import Block, Granularity, flat_slots
from gradwire.memory import NONE, Feedback
from hostile import decodings
from kernel_inputs import BLOCKS, GRADIENTS, blocks, gradients
from together import together

BITS = [0.005, 0.1, 0.5, 2.0]


@blocks
@gradients
def test_is_the_reference(block: Block, gradient: Tensor) -> None:
    number = list(BLOCKS.values()).index(block) + int(gradient.count_nonzero())
    bits = BITS[number % 4] if block.numel > 100 else 8.0
    codec_checks.check_is_the_reference(DeadZone(bits), block, gradient, (None, (0.9, 0.3))[number % 3 > 0])


@blocks
@gradients
def test_residual_is_what_was_not_sent(block: Block, gradient: Tensor) -> None:
    codec_checks.check_residual_is_what_was_not_sent(DeadZone(1.0), block, gradient)


@dataclass(frozen=True)
class Tiled(DeadZone):
    tile: int = 100


@together("bits", [0.1, 1.0, 4.0])
@together("name", ["normal", "one outlier", "many infinities"])
@blocks
def test_tiles_are_the_reference(block: Block, name: str, bits: float) -> None:
    codec_checks.check_is_the_reference(Tiled(bits), block, GRADIENTS[name], (0.9, 0.3))


@blocks
@gradients
def test_dithered_is_the_reference(block: Block, gradient: Tensor) -> None:
    number = list(BLOCKS.values()).index(block) + int(gradient.count_nonzero())
    codec_checks.check_is_the_reference(
        Dithered((0.5, 4.0)[number % 2]), block, gradient, (None, (0.9, 0.3))[number % 3 > 0]
    )


@pytest.mark.parametrize("bits", [0.5, 2.0, 6.0])
def test_dithered_is_unbiased(bits: float) -> None:
    codec_checks.check_unbiased(Dithered(bits))


def test_a_tile_stands_for_the_same_wherever_it_is() -> None:
    """The codes of a tile depend on nothing before it."""
    block = Block.cut(flat_slots([("w", (300,))]), Granularity("model"))
    gradient = torch.randn(100, generator=torch.Generator().manual_seed(0)).repeat(3)
    payload = codec_checks.encoded(Tiled(4.0), block, gradient, NONE)
    sizes = payload[8:20].view(torch.int32).tolist()
    assert sizes[0] == sizes[1] >= sizes[2] > 0
    sent = decoded_alone(gradient, 4.0, Tiled)
    assert torch.equal(sent[:100], sent[100:200])


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.lists(st.integers(0, 255), min_size=50, max_size=50), st.sampled_from(["layer", "model", "block:16"]))
def test_any_bytes_decode_alike(content: Sequence[int], granularity: str) -> None:
    block = Block.cut(flat_slots([("a", (33,)), ("b", (1,)), ("c", (40,))]), Granularity.parse(granularity))
    codec_checks.check_any_bytes(DeadZone(1.0), block, content)
    codec_checks.check_any_bytes(Tiled(1.0, tile=20), block, content)


def test_payloads_that_are_spoilt_stay_in_their_bounds() -> None:
    """A share of what `tests/fuzz.py --decoders --methods deadzone` does for as long as one likes."""
    draw = random.Random(0)
    for each in decodings("deadzone"):
        for _ in range(25):
            each.check(made(draw)[HEAD:], only_compiled=True)


def test_codes_are_complete_and_no_one_begins_another() -> None:
    made = codes()
    for context in range(CONTEXTS):
        own = made.lengths[context] <= LONGEST
        assert sum(2.0 ** -int(length) for length in made.lengths[context][own]) == 1
        assert own[ESCAPE]
        for symbol in np.flatnonzero(own).tolist():
            entry = int(made.symbols[context, made.words[context, symbol]])
            assert (entry % 2**LONGEST, entry >> LONGEST) == (symbol, made.lengths[context, symbol])


def test_classes_follow_one_another() -> None:
    ends = [first + (1 << width) for first, width in map(first_of, range(64))]
    assert [first_of(number)[0] for number in range(1, 64)] == ends[:-1]


def room_used(gradient: Tensor, bits: float) -> float:
    """The share of the room for codes up to the last byte that is not zero."""
    block = Block.cut(flat_slots([("w", (gradient.numel(),))]), Granularity("model"))
    payload = codec_checks.encoded(DeadZone(bits), block, gradient, NONE)
    return (int(payload.nonzero()[-1]) + 1 - 12) / (payload.numel() - 12)


@pytest.mark.parametrize("bits", [0.02, 0.1, 1.0, 6.0])
def test_payloads_are_full_to_a_twentieth(bits: float) -> None:
    """Where all values are looked at, to the grid of steps; else to that and 2 % of chance and 1.6 % to spare."""
    generator = torch.Generator().manual_seed(1)
    for numel in (40_000, 1_000_000):
        gradient = torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator)
        assert room_used(gradient, bits) >= 0.95, (numel, room_used(gradient, bits))


@pytest.mark.parametrize("columns", [128, 256, 384, 512, 1000])
@pytest.mark.parametrize("period", [2, 4, 8, 32])
def test_a_part_of_a_gradient_stands_for_all_of_it_whichever_rows_are_loud(columns: int, period: int) -> None:
    """As the frequent bytes' of an embedding are, or the last rows would find no room: more bits leave less of them.

    A loud row in two is sent with a signal to noise ratio of 1 at half a bit a value; where fewer are, each gets more.
    """
    rows = 2**20 // columns
    loud = torch.full((rows, 1), 0.02)
    loud[torch.arange(rows) % period == period - 1] = 1.0
    gradient = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) * loud).flatten()
    for bits, most in ((0.5, 0.5), (1.0, 0.2)):
        left = gradient - decoded_alone(gradient, bits)
        for part in (gradient.numel(), gradient.numel() // 16):
            share = float(left[-part:].square().sum() / gradient[-part:].square().sum())
            assert share < most, (bits, part, share)


@pytest.mark.parametrize("bits", [0.1, 0.5, 2.0])
def test_what_follows_rows_of_which_few_are_seen_has_room(bits: float) -> None:
    """The head of a model with an embedding, the more often of whose rows are seen the earlier they are.

    A sample says less of such rows than of values that are alike, so more of the room is left by. By chance codes may
    take more than two standard errors more than is expected once in twenty; in two of a dozen at most, then.
    """
    rows, columns, full = 30_000, 32, 0
    often = 1 - torch.exp(-2000 / torch.arange(1, rows + 1) ** 0.9 / 100)
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        seen = torch.rand(rows, generator=generator) < often
        embedding = (
            torch.randn(rows, columns, generator=generator) * (seen * torch.rand(rows, generator=generator))[:, None]
        )
        gradient = torch.cat((embedding.flatten(), 3 * torch.randn(4000, generator=generator)))
        left = gradient - decoded_alone(gradient, bits)
        full += not bool((left[-50:] == gradient[-50:]).all())
    assert full >= 10


def test_the_step_by_a_part_is_that_of_the_reference() -> None:
    """Rows are unlike, so that what the sample may be off by counts."""
    block = Block.cut(flat_slots([("w", (140_000,))]), Granularity("model"))
    generator = torch.Generator().manual_seed(5)
    gradient = torch.randn(1400, 100, generator=generator) * torch.rand(1400, 1, generator=generator) ** 4
    room = 80_000
    assert sampling(block, room) == 2
    sample = reference.deadzone_sample(block, gradient.flatten(), torch.ones(1), room)
    found = [kernels.deadzone_step(block, sample, 4096, room) for kernels in (cpu, reference)]
    assert found[0] == found[1]


def test_what_no_sample_of_one_turn_sees_does_not_wait_for_ever() -> None:
    """Each step's is of another turn; by the same one the last values never had room, and were owed 41 gradients."""
    block = Block.cut(flat_slots([("w", (300_000,))]), Granularity("model"))
    gradient = torch.randn(block.numel, generator=torch.Generator().manual_seed(0))
    for start, count, _, _ in chunks_sampled(block, int(1.5 * block.numel)).tolist():
        gradient[start : start + count] *= 1e-3
    residual = torch.zeros(block.numel)
    for step in range(41):
        codec_checks.encoded(DeadZone(1.5), block, gradient, Feedback(residual), step * codec_checks.KEY)
    owed = [float(residual[-part:].norm() / gradient[-part:].norm()) for part in (block.numel, 30_000)]
    assert max(owed) <= 2


def test_samples_of_each_turn_are_the_reference() -> None:
    block = Block.cut(flat_slots([("a", (100_003,)), ("b", (41_001,))]), Granularity("layer"))
    values, room, scales = (
        torch.randn(block.positions, generator=torch.Generator().manual_seed(1)),
        140_000,
        torch.ones(2),
    )
    samples = [cpu.deadzone_sample(block, values, scales, room, turn) for turn in range(TURNS + 1)]
    for turn, sample in enumerate(samples):
        assert torch.equal(sample, reference.deadzone_sample(block, values, scales, room, turn))
    assert torch.equal(samples[0], samples[-1])
    assert not any(torch.equal(samples[0], each) for each in samples[1:TURNS])


@pytest.mark.parametrize("codec", [DeadZone(0.5), Dithered(1.0)], ids=lambda each: type(each).__name__)
def test_the_host_waits_for_the_samples_of_all_owners_at_once(codec: DeadZone) -> None:
    """And what is written is what each block by itself is; rows may be longer."""
    shards = list(Block.cut(flat_slots([("a", (140, 60)), ("b", (700,))]), Granularity("model")).shards(3))
    gradient = torch.randn(9100, generator=torch.Generator().manual_seed(1))
    longest = 5 + max(map(codec.payload_bytes, shards))
    together, alone = (torch.full((3, longest), 7, dtype=torch.uint8) for _ in range(2))
    residuals = [torch.zeros(9100) for _ in range(2)]
    with mock.patch("gradwire.codecs.quantize.deadzone.steps_of", side_effect=steps_of) as asked:
        codec.encode_each(shards, gradient.clone(), Feedback(residuals[0]), together, 5)
    assert [len(call.args[0]) for call in asked.mock_calls] == [3]
    for shard, payload in zip(shards, alone, strict=True):
        size = codec.payload_bytes(shard)
        codec.encode(shard, gradient.clone(), Feedback(residuals[1]), payload[:size], 5)
        payload[size:] = 0
    assert torch.equal(together, alone)
    assert torch.equal(*residuals)


def test_what_a_sample_may_be_off_by_goes_by_all_of_it() -> None:
    """Also where the chunks by which the step is guessed are those that are quiet; by them it was 6 % finer."""
    block = Block.cut(flat_slots([("w", (300_000,))]), Granularity("model"))
    generator, room = torch.Generator().manual_seed(3), 150_000
    chunks = int(chunks_sampled(block, room)[:, 1].sum()) // 64
    loud = torch.rand(chunks, 1, generator=generator) ** 6
    sample = (torch.randn(chunks, 64, generator=generator) * loud).abs()
    every = 64 * chunks // FEW
    assert torch.equal(few_of(sample.flatten()), sample[::every].flatten())
    sample[::every] = 0
    found = [cpu.deadzone_step(block, torch.roll(sample, by, 0).flatten(), 4096, room)[0] for by in (0, 1, 5)]
    assert max(found) <= min(found) * (1 + 2 / 256)
    quiet = sample.flatten()
    assert cpu.deadzone_step(block, quiet, 4096, room) == reference.deadzone_step(block, quiet, 4096, room)


def with_few(loudness: float) -> tuple[Block, Tensor, int]:
    """A block, a sample of which those few are louder than others by which a step is guessed, and a room."""
    block = Block.cut(flat_slots([("w", (300_000,))]), Granularity("model"))
    generator, room = torch.Generator().manual_seed(6), 150_000
    sample = torch.randn(int(chunks_sampled(block, room)[:, 1].sum()) // 64, 64, generator=generator).abs()
    every = sample.numel() // FEW
    assert torch.equal(few_of(sample.flatten()), sample[::every].flatten())
    sample[::every] *= loudness
    return block, sample.flatten(), room


@pytest.mark.parametrize("loudness", [0.0, 1.0])
def test_a_step_is_found_from_another_on(loudness: float) -> None:
    """From whichever it is looked for it is the finest that has room, or next to it, and that of the reference."""
    block, sample, room = with_few(loudness)
    step, _ = cpu.deadzone_step(block, sample, 4096, room)
    for near in (step, step_of(index_of(step) + 30), step_of(index_of(step) - 1000), step_of(0)):
        found = [each.deadzone_step(block, sample, 4096, room, near=near) for each in (cpu, reference)]
        assert found[0] == found[1]
        assert abs(index_of(found[0][0]) - index_of(step)) <= 1


@pytest.mark.parametrize("loudness", [0.0, 1e-3, 0.1, 0.3, 1.0, 3.0, 1000.0])
def test_a_step_is_nearly_found_by_few(loudness: float) -> None:
    """Within two percent, also where those few are quieter or louder than the others: by those alone it was nothing."""
    block, sample, room = with_few(loudness)
    step, points = cpu.deadzone_step(block, sample, 4096, room)
    nearly = [each.deadzone_step(block, sample, 4096, room, exactly=False) for each in (cpu, reference)]
    assert nearly[0] == nearly[1]
    assert 0.98 <= nearly[0][0] / step <= 1.02
    assert points == pytest.approx(nearly[0][1], abs=2)


@pytest.mark.parametrize("bits", [0.02, 0.3, 2.0, 7.0])
@pytest.mark.parametrize("spread", [0, 3])
@pytest.mark.parametrize("kernels", [cpu, reference], ids=["cpu", "reference"])
def test_no_finer_step_has_room(kernels: Any, spread: int, bits: float) -> None:
    """Of values that are all looked at, however far from all of them those are by which it is guessed."""
    block = Block.cut(flat_slots([("w", (20_000,))]), Granularity("model"))
    generator = torch.Generator().manual_seed(2)
    rows = (spread * torch.randn(100, 1, generator=generator)).exp()
    values = (torch.randn(100, 200, generator=generator) * rows).flatten()
    payload = torch.empty(deadzone_payload_bytes(block, 4096, bits), dtype=torch.uint8)
    room = 8 * deadzone_room(block, 4096, payload)
    step, points = kernels.deadzone_step(block, values.abs(), 4096, room)
    finer = float(np.uint32(np.float32(step).view(np.uint32) - (1 << 15)).view(np.float32))
    fits = [
        bool(cpu.deadzone_encode(block, values.clone(), False, torch.tensor([each]), points, 4096, payload))
        for each in (step, finer)
    ]
    assert fits == [True, False]


def test_the_step_of_a_large_gradient_is_found_in_a_part_of_it() -> None:
    cases = [(2**17, 8), (2**17 + 1, 8), (2**24, 0.005), (2**24, 0.1), (2**24, 8)]
    assert [sampling(Block.dense("w", np.array([n])), int(bits * n)) for n, bits in cases] == [1, 5, 2, 26, 512]


def decoded_alone(gradient: Tensor, bits: float, kind: type[DeadZone] = DeadZone) -> Tensor:
    block = Block.cut(flat_slots([("w", (gradient.numel(),))]), Granularity("model"))
    payload = codec_checks.encoded(kind(bits), block, gradient, NONE)
    sent = torch.empty_like(gradient)
    kind(bits).decode(block, payload[None], sent, 1.0)
    return sent


def test_values_that_are_all_alike_are_sent_until_the_room_is_full() -> None:
    sent = decoded_alone(torch.full((10_000,), -3.0), 0.1)
    count = int((sent != 0).sum())
    assert 300 <= count <= 1000
    assert torch.equal(sent[:count], torch.full((count,), float(sent[0])))
    assert sent[0] == pytest.approx(-3, rel=0.35)


@pytest.mark.parametrize("others", [0.0, 1.0])
@pytest.mark.parametrize("loud", [1, 2])
def test_a_few_loud_values_of_a_sample_leave_room(loud: int, others: float) -> None:
    """Of so few what a sample may be off by is more than all they take: nothing was sent, or there was no such step."""
    block = Block.cut(flat_slots([("w", (140_000,))]), Granularity("model"))
    gradient, room = torch.full((block.numel,), others), 120_000
    assert sampling(block, room) == 2
    gradient[chunks_sampled(block, room)[8 : 8 * loud + 1 : 8, 0]] = -1000
    sample = reference.deadzone_sample(block, gradient, torch.ones(1), room)
    found = [kernels.deadzone_step(block, sample, 4096, room) for kernels in (cpu, reference)]
    assert found[0] == found[1]
    assert found[0][0] < 1000
    sent = decoded_alone(gradient, 1.5)
    assert bool((sent[gradient < 0] < -900).all())


@pytest.mark.parametrize("loudest", [1.0, 100.0])
@pytest.mark.parametrize("bits", [0.5, 1.5])
def test_no_value_waits_for_ever_for_others_that_are_alike(bits: float, loudest: float) -> None:
    """Those before the last one filled the room in every step, and it never was sent."""
    gradient = torch.ones(2560)
    gradient[-1] = loudest
    block = Block.cut(flat_slots([("w", (gradient.numel(),))]), Granularity("model"))
    residual, owed = torch.zeros(gradient.numel()), []
    for _ in range(120):
        payload = codec_checks.encoded(DeadZone(bits), block, gradient, Feedback(residual))
        owed.append(float((residual / gradient).abs().max()))
        room = 8 * deadzone_room(block, 4096, payload)
        found = [kernels.deadzone_step(block, residual.abs(), 4096, room) for kernels in (cpu, reference)]
        assert found[0] == found[1]
    assert max(owed) <= 40


def test_an_outlier_is_sent_as_it_is_and_does_not_hide_the_others() -> None:
    gradient = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    gradient[77] = 3e4 * LIMIT
    sent = decoded_alone(gradient, 4.0)
    assert sent[77] == gradient[77]
    others = torch.arange(4000) != 77
    assert (sent - gradient)[others].square().sum() <= 0.1 * gradient[others].square().sum()


def test_nothing_is_sent_as_more_than_a_float_holds() -> None:
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0)).sign() * LARGEST
    assert decoded_alone(gradient, 2.0).isfinite().all()


def test_a_single_value_and_none() -> None:
    assert decoded_alone(torch.tensor([-1.5]), 0.005)[0] == pytest.approx(-1.5, rel=1e-2)
    assert not decoded_alone(torch.zeros(100), 0.1).any()


def test_finer_steps_take_more_bits_and_leave_less() -> None:
    gradient = torch.randn(20_000, generator=torch.Generator().manual_seed(2))
    errors = [float((decoded_alone(gradient, bits) - gradient).square().mean()) for bits in (0.05, 0.2, 1, 2, 4, 6)]
    assert errors == sorted(errors, reverse=True)
    for bits, error in zip((1, 2, 4, 6), errors[2:], strict=True):
        assert 0 <= 10 * math.log10(error) + 20 * math.log10(2) * bits <= 2.7, "decibels above the bound"


@pytest.mark.parametrize("bits", [0.005, 0.02, 0.1, 0.3, 1.0, 2.0, 8.0])
def test_payloads_have_the_bits_asked_for_but_a_floor(bits: float) -> None:
    def size(numel: int) -> int:
        return DeadZone(bits).payload_bytes(Block.cut(flat_slots([("w", (numel,))]), Granularity("model")))

    assert size(1) == 28
    assert 1 <= 8 * size(20_000_000) / (bits * 20_000_000) <= 1.005


@pytest.mark.parametrize("bits", [0, 0.004, 8.1, math.nan, -1])
def test_bits_out_of_range_are_refused(bits: float) -> None:
    with pytest.raises(ConfigurationError, match=r"bits=.* is out of range; choose 0.005 to 8 a value"):
        DeadZone(bits)


def test_kernels_are_compiled_once() -> None:
    codec_checks.check_compiled_once("deadzone", "deadzone_step", "deadzone_decode")
