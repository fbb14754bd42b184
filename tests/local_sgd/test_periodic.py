"""Periodic averaging: local steps, then an average of what they changed, by its laws."""

from __future__ import annotations

import copy
import random
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from catalogue import OPTIONS, has_momentum
from gradwire import memory as memories
from gradwire import methods
from gradwire.layout import Granularity
from gradwire.local_sgd import fragments
from gradwire.local_sgd.fragments import Piece, cut
from gradwire.local_sgd.schedule import Cut, Schedule
from local_training import ByHand, backward, eager_nesterov, loss, nesterov, network, sgd, train
from models import flat, gathered, same_everywhere
from pool import Pool, ranks


def p_local_steps_and_a_quantised_average() -> None:
    """By hand: the mean of what one worker alone would decode of each change."""
    net = network()
    handle = gradwire.periodic(
        sgd(net), every=3, method="qsgd", bits=4, route="gather", parameters=net.named_parameters(), seed=5
    )
    other = network()
    train(other, sgd(other), range(3))
    optimizer = handle._optimizer
    train(net, optimizer, range(2))
    assert not same_everywhere(flat(net))
    train(net, optimizer, range(2, 3))
    assert same_everywhere(flat(net))
    start = dict(network().named_parameters())
    for name, parameter in net.named_parameters():
        changes = gathered((start[name] - dict(other.named_parameters())[name]).detach())
        if parameter.numel() < 1024:
            expected = torch.stack(changes).mean(0)
            torch.testing.assert_close(start[name] - parameter, expected, rtol=1e-4, atol=1e-7)
        else:
            bound = torch.stack([change.abs().amax() / 7 for change in changes]).mean()
            assert (start[name] - parameter - torch.stack(changes).mean(0)).abs().max() <= bound
    assert (handle.steps_done, handle.syncs, handle.dropped) == (3, 1, 0)
    stats = handle.stats()
    assert stats.steps == 3
    assert stats.dense_bytes == 3 * (2 * (dist.get_world_size() - 1) * 4 * flat(net).numel() // dist.get_world_size())
    handle.close()


def every_method(names: list[str]) -> list[str]:
    """Each runs, and leaves the same bits on all ranks after every average and other bits between."""
    wrong = []
    for name in names:
        options = dict(OPTIONS.get(name, [{}])[0])
        if has_momentum(methods.get(name)):
            options["memory"] = "residual"
        votes = name in ("signsgd", "signum", "lion", "lioncub", "demo", "dion")
        net = network()
        optimizer = sgd(net)
        handle = gradwire.periodic(
            optimizer,
            every=2,
            method=name,
            parameters=net.named_parameters(),
            outer=(lambda parameters: torch.optim.SGD(parameters, lr=1e-3)) if votes else None,
            **options,
        )
        for period in range(3):
            before = flat(net)
            train(net, optimizer, range(2 * period, 2 * period + 1))
            between = same_everywhere(flat(net))
            train(net, optimizer, range(2 * period + 1, 2 * period + 2))
            if between or not same_everywhere(flat(net)) or torch.equal(flat(net), before):
                wrong.append(f"{name} in period {period}")
        handle.close()
    return wrong


@ranks(3)
def test_means_are_conserved() -> None:
    """With error feedback, what all workers moved together is what was taken plus what is remembered."""
    for name, route in [("topk", "gather"), ("efsignsgd", "gather"), ("qsgd", "gather"), ("powersgd", "allreduce")]:
        net = network()
        optimizer = sgd(net, lr=0.003)
        handle = gradwire.periodic(
            optimizer, every=3, method=name, route=route, memory="residual", parameters=net.named_parameters()
        )

        def remembered(net: nn.Module = net, handle: gradwire.Periodic = handle) -> torch.Tensor:
            kept = handle.state_dict()["tensors"].get("residual", {})
            parts = [kept.get(key, torch.zeros_like(each)).reshape(-1) for key, each in net.named_parameters()]
            return torch.stack(gathered(torch.cat(parts).detach())).mean(0)

        seen: list[torch.Tensor] = []
        for period in range(3):
            before = remembered()
            train(net, optimizer, range(3 * period, 3 * period + 2))
            alone = copy.deepcopy(net)
            train(alone, sgd(alone, lr=0.003), range(3 * period + 2, 3 * period + 3))
            train(net, optimizer, range(3 * period + 2, 3 * period + 3))
            mean = torch.stack(gathered(flat(alone))).mean(0)
            torch.testing.assert_close(flat(net) - remembered(), mean - before, rtol=1e-4, atol=1e-5)
            seen.append(flat(net))
        assert not torch.equal(seen[0], seen[-1])
        handle.close()


@ranks(3)
def test_a_period_of_one_is_data_parallel_training() -> None:
    """Up to the rounding of ``x - (x - (x - lr g))``."""
    net, other = network(), network()
    optimizer = sgd(net, momentum=0.9)
    handle = gradwire.periodic(optimizer, every=1, method="dense", moments="average")
    model = DistributedDataParallel(other)
    train(net, optimizer, range(10))
    train(model, sgd(model, momentum=0.9), range(10))
    torch.testing.assert_close(flat(net), flat(other), rtol=1e-5, atol=1e-6)
    assert handle.syncs == 10
    handle.close()


@pytest.mark.parametrize("cut", ["contiguous", "strided", "layers"])
@ranks(3)
def test_sparse_parameter_averaging(cut: Any) -> None:
    """Sparse parameter averaging: each step averages one fragment, and nothing else is touched."""
    net = network()
    optimizer = sgd(net)
    handle = gradwire.periodic(optimizer, every=5, fragments=5, cut=cut, method="dense")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in range(10):
        alone = copy.deepcopy(net)
        train(alone, sgd(alone), range(step, step + 1))
        mine = list(alone.parameters())
        train(net, optimizer, range(step, step + 1))
        averaged = torch.zeros(0, dtype=torch.bool)
        for index, parameter in enumerate(parameters):
            mask = torch.zeros_like(parameter, dtype=torch.bool)
            for piece in handle._fragments[step % 5].pieces:
                if piece.parameter is parameter:
                    piece.write(mask, torch.ones(piece.shape, dtype=torch.bool))
            mean = torch.stack(gathered(mine[index].detach())).mean(0)
            torch.testing.assert_close(parameter[mask], mean[mask], rtol=1e-5, atol=1e-6)
            assert torch.equal(parameter[~mask], mine[index][~mask])
            averaged = torch.cat([averaged, mask.reshape(-1)])
        assert averaged.any()
        assert same_everywhere(flat(net)[averaged])
    assert handle.syncs == 10
    handle.close()


def streaming_equals_its_definition(fragments: int, delay: int, mix: float) -> None:
    net, other = network(), network()
    optimizer, theirs = torch.optim.AdamW(net.parameters(), lr=1e-3), torch.optim.AdamW(other.parameters(), lr=1e-3)
    handle = gradwire.periodic(
        optimizer, every=6, method="dense", outer=nesterov, fragments=fragments, cut="layers", delay=delay, mix=mix
    )
    places = {id(each): place for each, place in zip(net.parameters(), other.parameters(), strict=True)}
    groups = [[places[id(piece.parameter)] for piece in fragment.pieces] for fragment in handle._fragments]
    assert [each for group in groups for each in group] == list(other.parameters())
    hand = ByHand(groups, 6, delay, mix)
    for step in range(24):
        train(net, optimizer, range(step, step + 1))
        train(other, theirs, range(step, step + 1))
        hand.after(step + 1)
        torch.testing.assert_close(flat(net), flat(other), rtol=1e-4, atol=1e-5)
    handle.synchronize()
    assert same_everywhere(flat(net))
    assert handle.syncs >= 4 * fragments
    syncs = handle.syncs
    handle.synchronize()
    assert handle.syncs == syncs
    handle.close()


@pytest.mark.parametrize("fragments", [1, 3])
@ranks(2)
def test_eager_updates_are_their_definition(fragments: int) -> None:
    """Without momentum to the letter: ``x -= lr ((own - own before) / n + average before)``, on each worker.

    After synchronising, every average was taken once, and nothing of the guesses is left.
    """
    net, other, every, rate = network(), network(), 4, 0.6
    optimizer, theirs = torch.optim.AdamW(net.parameters(), lr=1e-3), torch.optim.AdamW(other.parameters(), lr=1e-3)
    handle = gradwire.periodic(
        optimizer,
        every=every,
        method="dense",
        outer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        fragments=fragments,
        cut="layers",
        eager=True,
        verify_every=1,
    )
    places = {id(each): place for each, place in zip(net.parameters(), other.parameters(), strict=True)}
    groups = [[places[id(piece.parameter)] for piece in fragment.pieces] for fragment in handle._fragments]
    begun = [[each.detach().clone() for each in group] for group in groups]
    owed = [[torch.zeros_like(each) for each in group] for group in groups]  # the average on its way, less one's share
    for step in range(1, 21):
        train(net, optimizer, range(step, step + 1))
        train(other, theirs, range(step, step + 1))
        for number, group in enumerate(groups):
            if step % every == (number + 1) * every // fragments % every:
                for each, start, rest in zip(group, begun[number], owed[number], strict=True):
                    own = start - each.detach()
                    start.sub_(rate * (own / dist.get_world_size() + rest))
                    each.data.copy_(start)
                    rest.copy_(own)
                    dist.all_reduce(rest)
                    rest.sub_(own).div_(dist.get_world_size())
        torch.testing.assert_close(flat(net), flat(other), rtol=1e-4, atol=1e-5)
    assert not same_everywhere(flat(net))
    handle.synchronize()
    assert same_everywhere(flat(net))
    handle.close()


@ranks(2)
def test_momentum_of_eager_updates_is_that_of_averages() -> None:
    """An outer optimizer with momentum: what ranks share is DiLoCo's with averages that come a period late."""
    net, rate, every = network(), 0.7, 3
    optimizer = sgd(net)
    handle = gradwire.periodic(optimizer, every=every, method="dense", outer=nesterov, eager=True)
    shared, start = flat(network()), flat(net)
    theirs = torch.optim.SGD([shared], lr=rate, momentum=0.9, nesterov=True)
    late = torch.zeros_like(shared)
    for period in range(5):
        alone = copy.deepcopy(net)
        train(alone, sgd(alone), range(every * period, every * period + every))
        train(net, optimizer, range(every * period, every * period + every))
        own = start - flat(alone)
        if period:
            shared.grad = late
            theirs.step()
        late = torch.stack(gathered(own)).mean(0)
        ahead, state = shared.clone(), copy.deepcopy(theirs.state_dict())
        shared.grad = own / dist.get_world_size()
        theirs.step()
        torch.testing.assert_close(flat(net), shared, rtol=1e-4, atol=1e-5)
        shared.copy_(ahead)
        theirs.load_state_dict(state)
        start = flat(net)
    handle.close()


def recipes() -> list[str]:
    """The recipes that the documentation names."""
    found = []
    for title, recipe in RECIPES.items():
        net = network()
        optimizer = sgd(net)
        handle = gradwire.periodic(optimizer, parameters=net.named_parameters(), **recipe)
        first = loss(net)
        train(net, optimizer, range(24))
        handle.synchronize()
        assert same_everywhere(flat(net)), title
        assert loss(net) < first, title
        assert handle.stats().ratio > 1.5, title
        found.append(title)
        handle.close()
    return found


@ranks(2)
def test_muloco() -> None:
    """Muon for matrices and AdamW for the rest, a handle each; with and without compression, and 2 bits dense."""
    ends, compressed = [], ({"method": "topk", "ratio": 0.1}, {"method": "qgz", "bits": 2})
    for choices in ({"method": "dense"}, *({**each, "memory": memories.Residual(beta=0.9)} for each in compressed)):
        net = network()
        matrices = [each for each in net.named_parameters() if each[1].dim() == 2]
        others = [each for each in net.named_parameters() if each[1].dim() != 2]
        optimizers = [
            torch.optim.Muon([each for _, each in matrices], lr=0.005, weight_decay=0.0),
            torch.optim.AdamW([each for _, each in others], lr=1e-3),
        ]
        handles = [
            gradwire.periodic(optimizer, every=8, parameters=named, outer=nesterov, **choices)
            for optimizer, named in zip(optimizers, (matrices, others), strict=True)
        ]
        first = loss(net)
        for step in range(48):
            backward(net, step)
            for optimizer in optimizers:
                optimizer.step()
        assert same_everywhere(flat(net)), choices
        ends.append(loss(net) / first)
        assert handles[0].stats().ratio > (7 if choices["method"] == "dense" else 28), choices
        for handle in handles:
            handle.close()
    assert max(ends) < 0.5, ends


def stretches_of_any_length(least: list[int]) -> list[bool]:
    """Whether parameters are the same to the last bit, however much is averaged at once."""
    usual, same = fragments.STRETCH_ELEMENTS, []
    for method, options in (("dense", {}), ("qsgd", {"memory": "residual"}), ("topk", {"ratio": 0.1})):
        found = []
        for fragments.STRETCH_ELEMENTS in least:
            net = network()
            handle = gradwire.periodic(
                sgd(net), every=2, method=method, parameters=net.named_parameters(), fuse_bytes=1000, **options
            )
            train(net, handle._optimizer, range(4))
            found.append(flat(net))
            handle.close()
        same += [torch.equal(each, found[0]) for each in found]
    fragments.STRETCH_ELEMENTS = usual
    return same


RECIPES: dict[str, dict[str, Any]] = {
    "local SGD": {"every": 8, "method": "dense"},
    "PQASGD": {"every": 8, "method": "qsgd", "bits": 4},
    "SPA-SGD": {"every": 4, "fragments": 4, "method": "dense"},
    "Qsparse-local-SGD": {"every": 8, "method": "topk", "ratio": 0.1, "values": "qsgd:4"},
    "SBC": {"every": 8, "method": "sbc", "ratio": 0.05},
    "DiLoCo": {"every": 8, "method": "dense", "outer": nesterov},
    "Streaming DiLoCo": {
        "every": 8,
        "method": "qsgd",
        "bits": 4,
        "outer": nesterov,
        "fragments": 2,
        "cut": "layers",
        "delay": 2,
        "mix": 0.5,
    },
    "DiLoCo with eager updates": {"every": 8, "method": "dense", "outer": eager_nesterov, "eager": True},
    "SparseLoCo": {
        "every": 8,
        "method": "topk",
        "ratio": 0.05,
        "values": "quantile:4",
        "granularity": "block:4096",
        "memory": memories.Residual(beta=0.95),
    },
    "post-local SGD": {"every": 8, "method": "dense", "warmup_steps": 4},
}


@pytest.mark.parametrize("way", get_args(Cut))
def test_fragments_hold_every_coordinate_once(way: Cut) -> None:
    draw = random.Random(0)
    for _ in range(60):
        shapes = [draw.choices(range(1, 9), k=draw.randrange(4)) for _ in range(draw.randrange(1, 12))]
        parameters = [(str(index), nn.Parameter(torch.zeros(shape))) for index, shape in enumerate(shapes)]
        total = sum(each.numel() for _, each in parameters)
        count = draw.randint(1, min(12, len(parameters) if way == "layers" else total))
        fragments = cut(parameters, Schedule(12, count, way, 0, 1.0, False, 0, "keep"), Granularity("layer"))
        assert len(fragments) == count
        with torch.no_grad():
            for fragment in fragments:
                for piece in fragment.pieces:
                    piece.write(piece.parameter, piece.read(piece.parameter) + 1)
        assert all((each == 1).all() for _, each in parameters)
        sizes = [fragment.anchor.numel() for fragment in fragments]
        assert min(sizes) >= 1
        assert way == "layers" or count == 1 or max(sizes) - min(sizes) <= 1


def test_pieces_of_tensors_that_are_not_contiguous() -> None:
    parameter = nn.Parameter(torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last))
    rows = parameter.detach().contiguous().view(-1).clone()
    piece = Piece.some("filter", parameter, 7, 300, 5)
    assert torch.equal(piece.read(parameter).view(-1), rows[7:300:5])
    piece.write(parameter, torch.arange(piece.numel).float())
    rows[7:300:5] = torch.arange(piece.numel)
    assert torch.equal(parameter.detach().contiguous().view(-1), rows)


def test_pqasgd(pool: Pool) -> None:
    for workers in (2, 3):
        pool.run(workers, p_local_steps_and_a_quantised_average)


@pytest.mark.parametrize("workers", [2, 3])
def test_every_method_averages_changes(pool: Pool, workers: int) -> None:
    assert all(wrong == [] for wrong in pool.run(workers, every_method, list(methods.names())))


@pytest.mark.parametrize(("fragments", "delay", "mix"), [(1, 0, 1.0), (1, 3, 1.0), (3, 1, 0.5), (2, 5, 0.25)])
def test_streaming_diloco_is_its_definition(pool: Pool, fragments: int, delay: int, mix: float) -> None:
    """With one fragment, no delay and nothing mixed in that is DiLoCo's."""
    pool.run(2, streaming_equals_its_definition, fragments, delay, mix)


def test_bits_do_not_depend_on_how_much_is_averaged_at_once(pool: Pool) -> None:
    assert all(pool.run(2, stretches_of_any_length, [1, 1500, 1 << 20])[0])


def test_recipes(pool: Pool) -> None:
    assert pool.run(2, recipes)[0] == list(RECIPES)
