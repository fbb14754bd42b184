"""Methods that look at gradients in another basis: what each promises beyond the laws."""

from __future__ import annotations

import itertools
import statistics
import sys
from contextlib import nullcontext, suppress

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire import methods
from gradwire.codecs.transform.centroids import POSITIVE
from gradwire.codecs.transform.cosine import cosines
from gradwire.engine import Configuration
from gradwire.errors import ConfigurationError, PayloadError
from gradwire.layout import Block, Granularity, Slot, flat_slots
from gradwire.local.world import LocalWorld
from gradwire.memory import NONE, NoMemory, Store
from gradwire.methods import Context
from gradwire.randomness import gaussian, key_of, mix64
from pool import Pool


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def averages(method: str, gradients: list[list[torch.Tensor]], options: dict[str, object]) -> list[torch.Tensor]:
    """What a rank gets of ``gradients[step][rank]``."""
    parameter = torch.nn.Parameter(torch.zeros_like(gradients[0][0]))
    sync = gradwire.Synchronizer([("weight", parameter)], method, **options)
    found = []
    for step in gradients:
        parameter.grad = step[dist.get_rank()].clone()
        sync.synchronize()
        found.append(parameter.grad.clone())
    sync.close()
    return found


def test_sketched_sgd_follows_the_papers_algorithm(pool: Pool) -> None:
    """With a sketch so wide that estimates are all but exact: momentum, accumulation, top-k of the mean, zeroing."""
    gradients = [[draw(40, 50, seed=10 * step + rank) ** 3 for rank in range(2)] for step in range(4)]
    options = {"ratio": 0.05, "columns": 500.0, "candidates": 4}
    found = pool.run(2, averages, "sketchedsgd", gradients, options)[0]
    u, v = torch.zeros(2, 40, 50), torch.zeros(2, 40, 50)
    for average, step in zip(found, gradients, strict=True):
        u = 0.9 * u + torch.stack(step)
        v += u
        mean = v.mean(0)
        sent = mean.abs() >= mean.abs().flatten().topk(100).values[-1]
        torch.testing.assert_close(average, torch.where(sent, mean, 0), rtol=1e-4, atol=1e-5)
        u[:, sent], v[:, sent] = 0, 0


def test_sketched_sgd_without_memory_sends_exact_values() -> None:
    tensor = draw(64, 64, seed=1) ** 5
    decoded = gradwire.roundtrip(tensor, "sketchedsgd", memory="none", ratio=0.02, columns=100.0).decoded
    chosen = decoded != 0
    assert int(chosen.sum()) == 82
    assert torch.equal(decoded[chosen], tensor[chosen])
    assert tensor[chosen].abs().min() >= tensor.abs().flatten().topk(82).values[-1]


def test_sketched_sgd_may_take_all_for_candidates() -> None:
    """However large the number, as with as many as there are it is top-k."""
    tensor = torch.randn(20, 30, generator=torch.Generator().manual_seed(1))
    for candidates in (600, sys.maxsize, 10**30):
        choices = {"memory": "none", "ratio": 0.01, "candidates": candidates}
        decoded = gradwire.roundtrip(tensor, "sketchedsgd", **choices).decoded
        assert torch.equal(decoded, gradwire.roundtrip(tensor, "topk", memory="none", ratio=0.01).decoded)


def test_thc_averages_what_every_worker_left_out(pool: Pool) -> None:
    """The average is the mean of the workers' own decoded codes, on both routes, with sums of 8 and of 16 bits."""
    gradients = [[draw(60, 50, seed=rank) for rank in range(3)]]
    mean = torch.stack(gradients[0]).mean(0)
    for route in ("gather", "sharded"):
        for grain in (30, 200):
            found = pool.run(3, averages, "thc", gradients, {"route": route, "grain": grain})
            assert all(torch.equal(each[0], found[0][0]) for each in found)
            error = (found[0][0] - mean).square().sum() / mean.square().sum()
            assert error < 0.06, (route, grain, error)


def test_thc_rejects_sums_that_no_workers_send() -> None:
    thc = gradwire.methods.make("thc", {})
    with pytest.raises(PayloadError, match="61"):
        thc._check(torch.tensor([[0, 61]], dtype=torch.uint8), 2)
    with pytest.raises(PayloadError):
        thc._check(torch.tensor([[0, 0, 45, 1]], dtype=torch.uint8), 10)
    thc._check(torch.tensor([[0, 0, 44, 1]], dtype=torch.uint8), 10)


def test_thc_refuses_more_workers_than_its_sums_have_bits_for() -> None:
    block, store = Block.cut(flat_slots([("tensor", (1, 8))]), Granularity("layer")), Store(torch.device("cpu"))
    for grain, workers, remedy in ((255, 257, None), (255, 258, "grain=254 or less"), (15, 4370, "such as 'eden'")):
        context = Context(block, 8, store, NoMemory(), "gather", None, 0, workers, 0, Granularity("layer"))
        with nullcontext() if remedy is None else pytest.raises(ConfigurationError, match=remedy):
            methods.make("thc", {"grain": grain}).init(context)


@pytest.mark.parametrize(("bits", "expected"), [(1, 0.5708), (2, 0.1331), (4, 0.00959)])
@pytest.mark.parametrize("power", [1, 3], ids=["normal", "heavy tails"])
def test_eden_has_the_published_error_and_no_bias_on_dense_gradients(bits: int, expected: float, power: int) -> None:
    """Errors within 5 %. The squared error of the mean of 200 draws is within 25 % of the variance of the mean."""
    tensor = draw(64, 128, seed=3) ** power
    draws = torch.stack([gradwire.roundtrip(tensor, "eden", bits=bits, step=step).decoded for step in range(200)])
    errors = (draws - tensor).square().sum((1, 2)) / tensor.square().sum()
    assert errors.mean() == pytest.approx(expected, rel=0.05)
    variance = draws.double().var(0) / len(draws)
    assert 0.75 <= (draws.double().mean(0) - tensor).square().sum() / variance.sum() <= 1.25
    # the part along each rotated piece is exact
    for piece, sent in zip(tensor.view(-1, 4096), draws[0].view(-1, 4096), strict=True):
        assert torch.dot(piece, sent) == pytest.approx(float(piece.square().sum()), rel=1e-4)


def test_eden_errs_less_the_more_workers_there_are(pool: Pool) -> None:
    """Workers' rotations differ, so that errors of equal gradients cancel out on the gather route."""
    gradients = [[draw(60, 70, seed=1)] * 4]
    found = pool.run(4, averages, "eden", gradients, {"bits": 1, "route": "gather"})[0][0]
    error = (found - gradients[0][0]).square().sum() / gradients[0][0].square().sum()
    assert error == pytest.approx(0.5708 / 4, rel=0.1)


def test_centroids_are_the_means_of_what_they_stand_for() -> None:
    normal = statistics.NormalDist()
    for positive in POSITIVE.values():
        edges = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(positive)), 12.0]
        for centroid, (low, high) in zip(positive, itertools.pairwise(edges), strict=True):
            mean = (normal.pdf(low) - normal.pdf(high)) / (normal.cdf(high) - normal.cdf(low))
            assert centroid == pytest.approx(mean, abs=1e-6)


def test_lion_votes_as_the_paper_does(pool: Pool) -> None:
    """An odd number of workers, of which none has a zero to vote with."""
    gradients = [[draw(40, 50, seed=10 * step + rank) for rank in range(3)] for step in range(4)]
    for route in ("sharded", "gather"):
        found = pool.run(3, averages, "lion", gradients, {"route": route, "beta1": 0.8, "beta2": 0.95})[0]
        m = torch.zeros(3, 40, 50)
        for average, step in zip(found, gradients, strict=True):
            votes = (0.8 * m + 0.2 * torch.stack(step)).sign()
            m = 0.95 * m + 0.05 * torch.stack(step)
            assert (average == votes.sum(0).sign()).float().mean() > 0.999


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_lion_cub_votes_as_its_authors_code_does(pool: Pool, bits: int) -> None:
    """Whole steps of ``2 / s`` of the mean magnitude, of a shard where it goes to an owner, s at most, added up."""
    gradients = [[draw(40, 50, seed=10 * step + rank) for rank in range(3)] for step in range(5)]
    options = {"beta1": 0.8, "beta2": 0.95, "bits": bits, "sync": 2}
    s = 2 ** (bits - 1) - 1
    whole = Block.cut(flat_slots([("tensor", (40, 50))]), Granularity("layer"))
    for route, blocks in (("sharded", whole.shards(3)), ("gather", [whole])):
        found = pool.run(3, averages, "lioncub", gradients, {**options, "route": route})[0]
        m = torch.zeros(3, 40, 50)
        for number, (average, step) in enumerate(zip(found, gradients, strict=True)):
            updates = (0.8 * m + 0.2 * torch.stack(step)).flatten(1)
            parts = updates.split([block.numel for block in blocks], 1)
            votes = [(part / part.abs().mean(1, keepdim=True) * (s / 2)).round().clip(-s, s) for part in parts]
            m = 0.95 * m + 0.05 * torch.stack(step)
            if number % 2:
                m = m.mean(0).expand(3, -1, -1)
            assert (average.flatten() == torch.cat(votes, 1).sum(0).sign()).float().mean() > 0.998
            assert (average == 0).any() or bits == 8


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_who_is_at_the_mean_magnitude_votes_either_way(bits: int) -> None:
    """So a parameter of one value, or values of one magnitude, move up as well as down."""
    slots = flat_slots([("scalar", (1,)), ("signs", (2, 3))])
    chosen = Configuration.make("lioncub", {"bits": bits})
    for size in (1.0, 0.3, 1e-3, 7e10):
        for sign in (1, -1):
            gradient = sign * size * torch.tensor([1.0, *[0.0] * (slots[1].offset - 1), 1.0, -1.0, 1.0, 1.0, -1.0, 1.0])
            gradients = [gradient.clone() for _ in range(3)]
            LocalWorld(chosen, slots, 3).average(gradients)
            assert torch.equal(gradients[0], gradient.sign()), (size, sign)


def test_a_vote_counts_the_same_whatever_its_worker_saw(pool: Pool) -> None:
    """Two small gradients outvote one that is a thousand times as large."""
    sign, loud = draw(40, 50, seed=1).sign(), draw(40, 50, seed=2) > 0
    gradient = torch.where(loud, 2, 0.5) * sign  # those below the mean magnitude may abstain
    gradients = [[gradient, gradient, -1000 * gradient]]
    for bits in (2, 4, 8):
        (average,) = pool.run(3, averages, "lioncub", gradients, {"bits": bits})[0]
        assert torch.equal(average[loud], sign[loud])


def test_sdp4bit_writes_levels_of_the_authors_transform() -> None:
    """Their matrix is Sylvester's, over 32 values at a time; levels are sevenths of the largest of 128 coordinates."""
    matrix = torch.ones(1, 1)
    for _ in range(5):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    values = draw(20, 128, seed=7)
    values[3, 5] = 100.0
    codec = methods.get("sdp4bit")().codec()
    block = Block.cut(flat_slots([("tensor", (20, 128))]), Granularity.parse("block:128"))
    payload, out = torch.empty(1, codec.payload_bytes(block), dtype=torch.uint8), torch.empty(20 * 128)
    codec.encode(block, values.flatten(), NONE, payload[0], 1)
    codec.decode(block, payload, out, 1.0)
    coordinates = [(each.view(20, 4, 32) @ matrix).view(20, 128) for each in (values, out)]
    steps = coordinates[0].abs().amax(1, keepdim=True) / 7
    levels = coordinates[1] / steps
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-4)
    assert ((coordinates[0] / steps - levels).abs() <= 1 + 1e-4).all()


def test_demo_follows_the_authors_optimizer(pool: Pool) -> None:
    """Delta in the original basis, mean over senders, inverse transform."""
    gradients = [[draw(32, 48, seed=10 * step + rank) for rank in range(2)] for step in range(3)]
    for sign in (False, True):
        options = {"topk": 5, "chunk": 16, "sign": sign, "decay": 0.9}
        found = pool.run(2, averages, "demo", gradients, options)[0]
        basis = cosines(16, torch.device("cpu"))
        deltas = torch.zeros(2, 2, 3, 16, 16)
        for average, step in zip(found, gradients, strict=True):
            deltas = 0.9 * deltas + torch.stack(step).view(2, 2, 16, 3, 16).transpose(2, 3)
            coefficients = basis @ deltas @ basis.T
            kept = coefficients.abs() >= coefficients.abs().flatten(-2).topk(5).values[..., -1, None, None]
            sent = torch.where(kept, coefficients, 0)
            deltas = deltas - basis.T @ sent @ basis
            mean = sent.sum(0) / kept.sum(0).clamp(min=1)
            expected = (basis.T @ mean @ basis).transpose(1, 2).reshape(32, 48)
            if sign:
                assert (average == expected.sign()).float().mean() > 0.999
            else:
                torch.testing.assert_close(average, expected, rtol=1e-4, atol=1e-5)


def test_dion_follows_the_papers_algorithm_on_the_mean(pool: Pool) -> None:
    """What workers with momenta of their own apply is what one with the mean of all gradients would."""
    gradients = [
        [torch.zeros(48, 32)] * 2,
        *([draw(48, 32, seed=10 * step + rank) for rank in range(2)] for step in range(4)),
    ]
    found = pool.run(2, averages, "dion", gradients, {"rank_fraction": 0.25, "momentum": 0.9})[0]
    slot = Slot("q of weight", (8, 32), 0)
    q = gaussian(mix64(slot.stream), slot.numel).view(slot.shape).T
    m = torch.zeros(48, 32)
    assert not found[0].any()
    for average, step in zip(found[1:], gradients[1:], strict=True):
        m += torch.stack(step).mean(0)
        p = torch.linalg.qr(m @ q).Q
        r = m.T @ p
        m -= (1 - 0.9) * p @ r.T
        q = r / r.norm(dim=0)
        torch.testing.assert_close(average, (48 / 32) ** 0.5 * p @ q.T, rtol=1e-3, atol=1e-4)


def test_gradiveq_is_exact_where_gradients_keep_to_what_was_learnt(pool: Pool) -> None:
    """Slices of 20 in a space of 3 dimensions; dense averages while learning, projections after."""
    directions = draw(3, 20, seed=0)
    gradients = [
        [(draw(60, 3, seed=10 * step + rank) @ directions).view(12, 100) for rank in range(2)] for step in range(6)
    ]
    gradients[5] = [draw(12, 100, seed=99 + rank) for rank in range(2)]
    options = {"slice": 20, "rank": 3, "learn_steps": 2, "use_steps": 5}
    found = pool.run(2, averages, "gradiveq", gradients, options)[0]
    for average, step in zip(found[:5], gradients[:5], strict=True):
        torch.testing.assert_close(average, torch.stack(step).mean(0), rtol=1e-4, atol=1e-4)
    projector = torch.linalg.pinv(directions) @ directions
    expected = (torch.stack(gradients[5]).mean(0).view(60, 20) @ projector).view(12, 100)
    torch.testing.assert_close(found[5], expected, rtol=1e-3, atol=1e-3)


def test_gradiveq_sends_coordinates_once_it_has_learnt() -> None:
    method = gradwire.methods.make("gradiveq", {"slice": 20, "rank": 3, "learn_steps": 1, "use_steps": 5})
    slots = flat_slots([("weight", (8, 105))])
    layer = Granularity("layer")
    context = Context(
        Block.cut(slots, layer), 840, Store(torch.device("cpu")), NoMemory(), "allreduce", None, 0, 1, 0, layer
    )
    state, sizes = method.init(context), []
    for step in range(2):
        rounds = method.synchronize(draw(840, seed=step), state, step)
        requests = next(rounds)
        with suppress(StopIteration):
            while True:
                sizes.append(requests[0].payload.numel())
                requests = rounds.send([draw(*requests[0].payload.shape, seed=2)])
    assert sizes == [840, 3 * 20, 42 * 3]


@pytest.mark.parametrize("tall", [False, True])
def test_greedylore_sends_the_longest_directions_of_a_basis_of_dense_averages(pool: Pool, tall: bool) -> None:
    """As the paper writes it for one matrix of 32 by 48, with errors kept over dense steps; and for its transpose."""
    gradients = [[draw(32, 48, seed=10 * step + rank) for rank in range(2)] for step in range(7)]
    given = [[each.T.contiguous() for each in step] for step in gradients] if tall else gradients
    found = pool.run(2, averages, "greedylore", given, {"rank": 3, "refresh": 4})[0]
    errors = torch.zeros(2, 32, 48)
    for step, (average, own) in enumerate(zip(found, gradients, strict=True)):
        owed = torch.stack(own) + errors
        sent = owed
        if step % 4 == 0:
            basis = torch.linalg.svd(owed.mean(0)).U
        else:
            scores = (basis.T @ owed @ gaussian(mix64(key_of(0, step)) ^ 48, 48)).mean(0).square()
            longest = basis[:, scores.topk(3).indices]
            sent = longest @ (longest.T @ owed)
        errors = owed - sent
        torch.testing.assert_close(average.T if tall else average, sent.mean(0), rtol=1e-4, atol=1e-4)


def test_greedylore_learns_of_the_first_average_that_is_finite() -> None:
    """A first step that overflows, as with loss scaling, does not leave it without a basis."""
    configuration = Configuration.make("greedylore", {"rank": 2}, memory="none")
    world = LocalWorld(configuration, flat_slots([("weight", (40, 60))]), 1)
    directions = draw(40, 2, seed=9)
    for step in range(4):
        gradient = (directions @ draw(2, 60, seed=step)).flatten()
        expected = gradient.clone()
        if step == 0:
            gradient[7] = torch.inf
        world.average([gradient])
        if step > 0:
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)


RESUMED = {
    "sketchedsgd": {"ratio": 0.05},
    "thc": {"rotation": 64},
    "demo": {"topk": 3},
    "dion": {},
    "lion": {},
    "lioncub": {"sync": 2},
    "alq": {},
    "atomo": {"rank": 2, "memory": "diana"},
    "gradiveq": {"slice": 32, "rank": 5, "learn_steps": 2, "use_steps": 3, "memory": "residual"},
    "greedylore": {"rank": 2, "refresh": 5},
}


def resumed(method: str, options: dict[str, object], stop: int, reverse: bool) -> list[torch.Tensor]:
    """Eight steps; after ``stop`` of them another synchronizer goes on from the state, perhaps in another order."""
    shapes = {"first": (32, 48), "second": (40, 60)}
    named = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    sync = gradwire.Synchronizer(named, method, **options)
    for step in range(8):
        if step == stop:
            state = sync.state_dict()
            sync.close()
            sync = gradwire.Synchronizer(named[::-1] if reverse else named, method, **options)
            sync.load_state_dict(state)
        for index, (_, parameter) in enumerate(named):
            parameter.grad = draw(*parameter.shape, seed=100 * step + 10 * index + dist.get_rank())
        sync.synchronize()
    sync.close()
    return [parameter.grad for _, parameter in named if parameter.grad is not None]


@pytest.mark.parametrize("method", RESUMED)
def test_a_resumed_run_is_the_same(pool: Pool, method: str) -> None:
    """Bit for bit, also where parameters lie in another order, for every granularity that looks at them one by one."""
    options = {**RESUMED[method], "granularity": "layer"}
    whole = pool.run(2, resumed, method, options, -1, False)[0]
    for reverse in (False, True):
        again = pool.run(2, resumed, method, options, 3, reverse)[0]
        for ours, theirs in zip(again, whole, strict=True):
            assert torch.equal(ours, theirs)


def test_the_global_generator_is_not_touched() -> None:
    state = torch.get_rng_state()
    for method, options in RESUMED.items():
        for step in range(4):
            gradwire.roundtrip(draw(32, 48, seed=1), method, step=step, **options)
    assert torch.equal(state, torch.get_rng_state())
