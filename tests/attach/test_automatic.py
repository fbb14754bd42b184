"""``"auto"``: what is chosen in training is alike on all ranks, goes on as if attached then, and is never slower."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
import trained
from gradwire.attach import trial
from gradwire.attach.trial import Decision, decide
from gradwire.engine.automatic import AMONG, EXACT
from gradwire.engine.change import LASTING
from gradwire.engine.guards.spikes import SEEN
from gradwire.errors import ConfigurationError
from models import batch, gathered, network, same_everywhere
from pool import Pool, ranks

TOPK, LOW = "topk:ratio=0.1", "acpsgd:rank=2"
AMONG_TWO = [TOPK, LOW]


def shortly(body: Callable[..., Any], chosen: str | None = None, *arguments: Any) -> Any:
    """Trials of few steps and small probes; with a decision that does not depend on how fast anything is, if given."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SETTLING": 1, "TIMED": 1, "SIZES": (1 << 10,)}.items():
            patch.setattr(trial, name, value)
        if chosen is not None:
            promising = [] if chosen in EXACT else [chosen]
            patch.setattr(trial.Trial, "_promising", lambda self: promising)
            patch.setattr(trial, "decide", lambda *measured: Decision(chosen, "a test says so", measured[0], {}))
        return body(*arguments)


def advice(handle: gradwire.Handle) -> Decision | None:
    """What is known when the wire has done all that was submitted: a step ends for its caller a little earlier."""
    return handle.wire.call(lambda: handle.advice)


STEPS = 9
"""More than a trial of three lines takes, of three steps each, less one."""


class Run(trained.Run):
    def __init__(self, method: str = "auto", **choices: Any) -> None:
        super().__init__(method, **({"among": AMONG_TWO, **choices} if method == "auto" else choices))

    def step(self, number: int) -> Tensor:
        average = super().step(number)
        assert same_everywhere(average)
        return average


def decided() -> tuple[str, set[str], set[str], dict[str, str]]:
    """As measured: whatever comes out."""
    run = Run()
    assert run.handle.advice is None
    for number in range(STEPS + 1):
        run.step(number)
    found = advice(run.handle)
    assert found is not None
    described = run.handle.configuration.describe()
    assert described["chosen"] == found.line
    assert min(found.measured.values()) > 0
    run.handle.close()
    return str(found), set(found.measured), set(found.predicted), described


def test_all_ranks_decide_alike(pool: Pool) -> None:
    first, *others = pool.run(3, shortly, decided)
    assert others == [first, first]
    _, measured, predicted, _ = first
    assert measured >= set(EXACT)
    assert predicted == {*EXACT, *AMONG_TWO}


def as_attached_then(chosen: str) -> None:
    """Dense first, then 16 bits, then what is chosen, with what it remembers since it was tried."""
    run, dense, plain = Run(), Run("dense"), Run(chosen)
    trying = 2 * (trial.SETTLING + trial.TIMED + 1)
    found = [run.step(number) for number in range(STEPS)]
    for number in range(trying // 2):
        assert torch.equal(found[number], dense.step(number))
    plain.step(0)  # as the other did, it forms its buckets after its first step
    plain.handle.load_state_dict({**plain.handle.state_dict(), "step": 0, "tensors": {}})
    for number in range(trying, STEPS):
        assert torch.equal(found[number], plain.step(number)), number
    assert getattr(advice(run.handle), "line", "") == chosen
    for each in (run, dense, plain):
        each.handle.close()


@pytest.mark.parametrize("chosen", [TOPK, LOW, "bf16"])
def test_what_is_chosen_goes_on_as_if_attached_when_it_was_tried(pool: Pool, chosen: str) -> None:
    pool.run(2, shortly, as_attached_then, chosen, chosen)


def saved_and_gone_on() -> None:
    """A restart after the decision gives the same bits and measures nothing; one before it begins to choose anew."""
    run = Run()
    for number in range(4):
        run.step(number)
    undecided = copy.deepcopy(run.handle.state_dict())
    for number in range(4, STEPS + 1):
        run.step(number)
    state = copy.deepcopy(run.handle.state_dict())
    expected = [run.step(number) for number in range(STEPS + 1, STEPS + 4)]
    run.handle.close()

    again = Run()
    again.handle.load_state_dict(state)
    assert getattr(advice(again.handle), "line", "") == TOPK
    assert [torch.equal(again.step(number), expected[number - STEPS - 1]) for number in range(STEPS + 1, STEPS + 4)]
    assert again.handle.engine.dense_steps == state["dense_steps"]

    again.handle.load_state_dict(undecided)
    assert again.handle.advice is None
    dense = Run("dense")
    assert torch.equal(again.step(4), dense.step(4))
    for number in range(5, STEPS + 5):
        again.step(number)
    assert advice(again.handle) is not None
    given = Run("topk", ratio=0.1)
    with pytest.raises(ConfigurationError, match=r"the state was saved with auto='dense bf16 .*attach with the same"):
        given.handle.load_state_dict(state)
    with pytest.raises(ConfigurationError, match=r"this handle has auto='dense bf16 "):
        again.handle.load_state_dict(given.handle.state_dict())
    for each in (again, dense, given):
        each.handle.close()


def test_a_restart_goes_on_with_what_was_chosen(pool: Pool) -> None:
    pool.run(2, shortly, saved_and_gone_on, TOPK)


def chosen_anew() -> None:
    """What a run owes when it begins to choose anew right after a restart, before DDP has brought a bucket."""
    run, again = Run(), Run()
    for number in range(STEPS + 1):
        run.step(number)
    again.handle.load_state_dict(run.handle.state_dict())
    owed = []
    for each in (run, again):
        assert getattr(advice(each.handle), "line", "") == TOPK
        each.handle.reconsider()
        owed.append(each.handle.state_dict()["tensors"]["owed"])
        each.handle.close()
    assert all(torch.equal(owed[1][name], each) for name, each in owed[0].items())
    assert any(each.any() for each in owed[0].values())


def test_a_restart_that_chooses_anew_loses_nothing(pool: Pool) -> None:
    pool.run(2, shortly, chosen_anew, TOPK)


def beside_others() -> None:
    """Dense first steps and pauses are no part of the trial; when asked, it begins anew."""
    run, dense = Run(start=2, verify_every=1, audit_every=3), Run("dense")
    for number in range(2):
        assert torch.equal(run.step(number), dense.step(number))
    run.handle.pause()
    for number in range(2, 4):
        assert torch.equal(run.step(number), dense.step(number))
    assert "undecided" in repr(run.handle)
    run.handle.resume()
    for number in range(4, 4 + STEPS):
        assert advice(run.handle) is None
        run.step(number)
    assert advice(run.handle) is not None
    assert "chose acpsgd" in repr(run.handle)
    run.handle.reconsider()
    assert run.handle.advice is None
    assert not torch.equal(run.step(20), dense.step(20))  # it takes along what acpsgd owes
    assert torch.equal(run.step(21), dense.step(21))
    for number in range(22, 20 + STEPS):
        run.step(number)
    assert advice(run.handle) is not None
    run.handle.close()
    with pytest.raises(ConfigurationError, match="attach with method='auto'"):
        dense.handle.reconsider()
    dense.handle.close()


def test_other_choices_go_along(pool: Pool) -> None:
    pool.run(2, shortly, beside_others, LOW)


def what_is_owed() -> None:
    """A run stops in the midst of a trial of what owes most of a gradient, chooses it, and then begins anew."""
    weight, noise = nn.Parameter(torch.zeros(64, 64)), torch.Generator().manual_seed(dist.get_rank())
    sync, given, taken = gradwire.Synchronizer([("weight", weight)], "auto", among=[TOPK]), 0.0, 0.0
    for number in range(3 * STEPS):
        weight.grad = torch.randint(-8, 9, (64, 64), generator=noise).float()  # of which bf16 rounds no average
        given = given + weight.grad
        sync.synchronize()
        taken = taken + weight.grad
        if number == STEPS - 2:
            assert "now topk" in repr(sync)
            state = copy.deepcopy(sync.state_dict())
            assert list(state["tensors"]) == ["owed"]
            sync.close()
            sync = gradwire.Synchronizer([("weight", weight)], "auto", among=[TOPK])
            sync.load_state_dict(state)
        if number == 2 * STEPS:
            assert "chose topk" in repr(sync)
            sync.reconsider()
    owed = gradwire.Owed(sync, nn.ParameterDict({"weight": weight})).state_dict()["weight"]
    torch.testing.assert_close(taken + owed, torch.stack(gathered(given)).mean(0), rtol=0, atol=1e-3)
    sync.close()


def test_nothing_that_is_owed_is_lost(pool: Pool) -> None:
    pool.run(2, shortly, what_is_owed, TOPK)


def what_is_known_of_gradients() -> None:
    """What a run that stops in the midst of a trial knows of gradients and rates does not depend on what averages."""
    weight, choices = nn.Parameter(torch.zeros(64, 64)), {"clip_spikes": 4, "learning_rate": lambda: 0.1}
    sync = gradwire.Synchronizer([("weight", weight)], "auto", among=[TOPK], **choices)
    for number in range(STEPS - 1):
        assert advice(sync) is None
        weight.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(number))
        sync.synchronize()
    kept = sync.state_dict()["tensors"]
    assert kept.keys() == {*LASTING}
    assert kept[SEEN]["weight"] == STEPS - 1
    sync.close()


def test_what_is_known_of_gradients_is_saved(pool: Pool) -> None:
    pool.run(2, shortly, what_is_known_of_gradients, TOPK)


def in_ones_own_loop() -> None:
    net = network()
    with closing(gradwire.Synchronizer(net, "auto", among=AMONG_TWO)) as sync:
        for number in range(STEPS):
            inputs, labels = batch(dist.get_rank(), number)
            net.zero_grad()
            nn.functional.cross_entropy(net(inputs), labels).backward()
            sync.synchronize()
        assert advice(sync) is not None
        assert sync.stats().steps == STEPS


def test_a_synchronizer_chooses_too(pool: Pool) -> None:
    pool.run(2, shortly, in_ones_own_loop, TOPK)


def in_nodes() -> tuple[str, int]:
    run = Run(inside=2)
    for number in range(STEPS):
        run.step(number)
    decision = advice(run.handle)
    assert decision is not None
    assert decision.measured.keys() >= set(EXACT)
    assert "inside=2" in str(run.handle.configuration)
    node_bytes = run.handle.stats().node_bytes
    run.handle.close()
    return decision.line, node_bytes


@pytest.mark.parametrize("chosen", [None, LOW])
def test_it_chooses_among_averages_in_two_levels(pool: Pool, chosen: str | None) -> None:
    first, *others = pool.run(4, shortly, in_nodes, chosen)
    assert chosen in (None, first[0])
    assert first[1] > 0
    assert all(line == first[0] for line, _ in others)


@ranks(1)
def test_one_worker_has_nothing_to_choose() -> None:
    net = network()
    with closing(gradwire.Synchronizer(net, "auto", among=[TOPK])) as sync:
        assert str(sync.advice) == "dense: there is one worker, and nothing is sent"


def of_shards() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate
    except ImportError:
        replicate = None
    model: Any = fully_shard(network(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    with pytest.raises(ConfigurationError, match="cannot choose for a model that is cut into shards"):
        gradwire.compress(model, "auto", among=[TOPK])
    if replicate is None:
        return
    model = replicate(network(), mesh=init_device_mesh("cpu", (4,)))
    with closing(gradwire.compress(model, "auto", among=[TOPK])) as handle:
        for number in range(STEPS):
            inputs, labels = batch(dist.get_rank(), number)
            nn.functional.cross_entropy(model.eval()(inputs), labels).backward()
        assert advice(handle) is not None
        assert handle.stats().steps == STEPS


def test_shards_cannot_choose_each_for_themselves_and_replicas_can(pool: Pool) -> None:
    pool.run(4, shortly, of_shards, TOPK)


def test_nothing_is_chosen_that_was_measured_slower() -> None:
    """Of all times in a grid: within 2 % of the better exact average, and 5 % faster if it compresses."""
    grid = (0.5, 0.9, 0.94, 0.96, 0.99, 1.0, 1.01, 1.03, 2.0)
    for full, half, third in itertools.product(grid, grid, [*grid, None]):
        seconds = {"dense": full, "bf16": half} | ({} if third is None else {TOPK: third})
        chosen = decide(seconds, {}).line
        assert seconds[chosen] <= min(full, half) / 0.98
        assert chosen in EXACT or seconds[chosen] < 0.95 * min(full, half)
        if third is not None and third < 0.95 * min(full, half):
            assert chosen == TOPK
            assert decide({**seconds, LOW: 0.9 * third}, {}).line == LOW
            assert decide({**seconds, LOW: 0.99 * third}, {}).line == TOPK  # alike, and it was named first
    assert "3.0 times as long to encode" in decide({"dense": 1.0, "bf16": 1.0}, {}, 3.0).reason


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"among": "topk"}, "among='topk' is no list of methods"),
        ({"among": [3]}, r"among=\[3\] is no list"),
        ({"among": ["tpok"]}, "did you mean 'topk'"),
        ({"among": ["fp16"]}, "which compresses nothing; dense and bf16 are always tried"),
        ({"among": ["topk:granularity=model"]}, "takes the whole gradient at once"),
        ({"among": ["subspace:bits=0.8"]}, "write granularity=bucket with it"),
        ({"route": "gather"}, "route='gather' came with method='auto'"),
        ({"ratio": 0.1}, "ratio=0.1 came with method='auto'"),
        ({"start": -1}, "start=-1 is out of range"),
    ],
)
@ranks(1)
def test_bad_input_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        gradwire.compress(DistributedDataParallel(network()), "auto", **arguments)


@ranks(1)
def test_elsewhere_a_method_is_given() -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    asked: list[Callable[[], object]] = [
        lambda: gradwire.periodic(optimizer, every=2, method="auto"),
        lambda: gradwire.roundtrip(torch.ones(9), "auto"),
        lambda: gradwire.Synchronizer(net, {"*": "auto"}),
    ]
    for ask in asked:
        with pytest.raises(ConfigurationError, match=r"'auto' is for gradwire\.compress and gradwire\.Synchronizer"):
            ask()


def test_what_is_chosen_among_is_known() -> None:
    from gradwire.engine.automatic import Automatic
    from gradwire.engine.choices import Choices

    automatic = Automatic.of({}, Choices())
    assert list(automatic.lines) == [*EXACT, *AMONG]
    assert automatic.as_saved({}).now == EXACT[0]
    assert automatic.as_saved({"chosen": AMONG[0]}).settled


def by_recipe() -> str:
    net, logged = network(), []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    with closing(gradwire.Synchronizer(net, "recipe:momentum")) as sync:
        described = str(sync.configuration)
    logging.getLogger("gradwire").removeHandler(handler)
    return f"{logged[:1]} {described}"


def test_a_recipe_is_the_line_that_was_measured(pool: Pool) -> None:
    first, second = pool.run(2, by_recipe)
    assert "recipe:momentum takes subspace:bits=1.5,route=sharded (21.1 x fewer bytes with 2 workers" in first
    assert "subspace(bits=1.5" in first
    assert second.startswith("[]")
