"""A method for each pattern of names: each does on its parameters what it does there alone, in one round."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import methods
from gradwire.engine import Choices, Configuration, Mixture
from gradwire.engine.mixture import Methods, configure
from gradwire.errors import ConfigurationError
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld
from models import batch, network
from pool import ranks

WORKERS = 2
SHAPES = {
    "embed": (60, 40),
    "a.weight": (40, 50),
    "a.bias": (40,),
    "b.weight": (30, 36),
    "head": (70, 20),
    "c.bias": (9,),
}
EMBED, WEIGHTS = "topk:ratio=0.1,memory=dgc", methods.ACPSGD(rank=2)
MIXED: list[dict[str, Any]] = [
    {"embed*": EMBED, "*.weight": WEIGHTS, "*": "qsgd:bits=4"},
    {"*.bias": "dense", "embed": "signsgd", "*.weight": "qsgd:bits=8,route=sharded", "*": "powersgd:rank=1"},
    {"a.*": "efsignsgd:granularity=block:64", "*": "efsignsgd:route=sharded"},
    {"*.weight": "topk:granularity=model,ratio=0.2", "*": "threshold:threshold=0.5"},
    {"h*": "dgc:preset=paper", "*": "ef21:ratio=0.2"},
    {"embed": {0: "topk:ratio=0.25", 1: "topk:ratio=0.01"}, "*": {0: "powersgd:rank=1", 2: methods.PowerSGD(rank=3)}},
]


def averages(method: Methods, names: list[str], steps: int = 3, **choices: Any) -> list[dict[str, Tensor]]:
    """What workers of a world average of some of the parameters."""
    slots = flat_slots([(name, SHAPES[name]) for name in names])
    world = LocalWorld(configure(method, {}, Choices(**choices)), slots, WORKERS)
    noise = {name: torch.Generator().manual_seed(len(name) + ord(name[0])) for name in names}
    found = []
    for _ in range(steps):
        drawn = [{name: torch.randn(SHAPES[name], generator=noise[name]) for name in names} for _ in range(WORKERS)]
        buffers = [torch.cat([each.view(-1) for each in of_rank.values()]) for of_rank in drawn]
        world.average(buffers)
        assert torch.equal(buffers[0], buffers[1])
        found.append({slot.name: buffers[0][slot.offset : slot.stop].clone() for slot in slots})
    return found


@pytest.mark.parametrize("mixed", MIXED, ids=str)
def test_each_method_does_what_it_does_alone(mixed: dict[str, Any]) -> None:
    together = averages(mixed, list(SHAPES), start=1)
    mixture = configure(mixed, {}, Choices())
    for pattern, rule in zip(mixed, mixture.rules, strict=True):
        own = [name for name in SHAPES if mixture.rule(name) is rule]
        alone = averages({"*": mixed[pattern]}, own, start=1)
        for step, expected in enumerate(alone):
            for name in own:
                assert torch.equal(together[step][name], expected[name]), (step, name)


def test_what_is_sent_is_what_all_send_alone_in_one_collective_of_a_kind() -> None:
    slots = flat_slots(list(SHAPES.items()))
    world = LocalWorld(configure({"a.*": "topk:ratio=0.1", "*": "topk:ratio=0.05"}, {}, Choices()), slots, WORKERS)
    sent = world.average([torch.ones(slots[-1].stop) for _ in range(WORKERS)]).sent_bytes
    alone, others = 0, ["embed", "b.weight", "head", "c.bias"]
    for method, names in (("topk:ratio=0.1", ["a.weight", "a.bias"]), ("topk:ratio=0.05", others)):
        own = flat_slots([(name, SHAPES[name]) for name in names])
        other = LocalWorld(configure(method, {}, Choices()), own, WORKERS)
        alone += other.average([torch.ones(own[-1].stop) for _ in range(WORKERS)]).sent_bytes
        assert world._transports[0]._issued == other._transports[0]._issued
    assert sent == alone


def test_a_schedule_gives_the_bits_of_changes_at_its_steps() -> None:
    """Of each pattern at its own steps; a state saved between them goes on."""
    slots, written = flat_slots(list(SHAPES.items())), {0: "topk:ratio=0.25", 1: "topk:ratio=0.01"}
    ranks = {0: "powersgd:rank=1", 2: "powersgd:rank=3"}
    both: list[Methods] = [{"embed": written, "*": ranks}, {"embed": written[0], "*": ranks[0]}]
    scheduled, changed = (LocalWorld(configure(method, {}, Choices()), slots, WORKERS) for method in both)
    assert [str(stage) for stage in scheduled.engines[0].configuration.stages] == [
        str(configure({"embed": embed, "*": others}, {}, Choices()))
        for embed, others in ((written[0], ranks[0]), (written[1], ranks[0]), (written[1], ranks[2]))
    ]
    assert scheduled.engines[0].configuration.describe()["'embed' ratio"] == "{0: 0.25, 1: 0.01}"
    for step in range(4):
        for engine in changed.engines:
            now = configure({"embed": written[min(step, 1)], "*": ranks[0 if step < 2 else 2]}, {}, Choices())
            assert isinstance(now, Mixture)
            engine.change(now)
        if step == 2:
            resumed = LocalWorld(scheduled.engines[0].configuration, slots, WORKERS)
            for engine, saved in zip(resumed.engines, scheduled.engines, strict=True):
                engine.go_on(saved.step, saved.dense_steps, paused=False)
                engine.store.load(saved.store.state(), saved.store.kinds())
            scheduled = resumed
        noise = torch.Generator().manual_seed(step)
        buffers = [torch.randn(slots[-1].stop, generator=noise) for _ in range(WORKERS)]
        others = [each.clone() for each in buffers]
        sent = [world.average(each).sent_bytes for world, each in ((scheduled, buffers), (changed, others))]
        assert sent[0] == sent[1]
        assert all(map(torch.equal, buffers, others)), step


@pytest.fixture(scope="module")
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parameters() -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.ones(shape))) for name, shape in SHAPES.items()]


@pytest.mark.usefixtures("_alone")
class TestAttached:
    def test_a_handle_says_what_goes_by_what(self) -> None:
        sync = gradwire.Synchronizer(parameters(), {"embed": "topk:ratio=0.1", "*": "qsgd"})
        dense = "dense: 1-D tensors and tensors below 1,024 elements"
        assert repr(sync).startswith("gradwire.Handle({'embed': topk(ratio=0.1, values=fp32, ")
        assert f"memory=residual, {dense}), '*': qsgd(bits=4, " in repr(sync)
        assert repr(sync).endswith(
            "1 worker; compressed: 4 tensors, 6,880 elements; averaged densely: 2 tensors, 49 elements)"
        )
        sync.close()
        sync = gradwire.Synchronizer(parameters(), {"embed": "topk:ratio=0.1", "*": "dense"})
        assert "compressed: 1 tensors, " in repr(sync)
        assert "averaged densely: 5 tensors, " in repr(sync)
        sync.close()

    @pytest.mark.parametrize("mixed", [MIXED[0], MIXED[-1]], ids=str)
    def test_a_run_goes_on_with_the_same_bits(self, mixed: dict[str, Any]) -> None:
        states, found = [], []
        for resumed in (False, True):
            named = parameters()
            sync = gradwire.Synchronizer(named, mixed, learning_rate=lambda: 0.1)
            for step in range(4):
                if resumed and step == 2:
                    sync.load_state_dict(states[0])
                for name, each in named:
                    noise = torch.Generator().manual_seed(step + len(name))
                    each.grad = torch.randn(each.shape, generator=noise)
                if resumed and step < 2:
                    continue
                sync.synchronize()
                if step == 1:
                    states.append(sync.state_dict())
            found.append([each.grad for _, each in named])
            sync.close()
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
        other = gradwire.Synchronizer(parameters(), {"embed*": EMBED, "*": WEIGHTS})
        with pytest.raises(ConfigurationError, match=r"the state was saved with patterns="):
            other.load_state_dict(states[0])
        other.close()

    def test_a_name_is_a_pattern_of_itself(self) -> None:
        """Keys of a ``ParameterDict`` have brackets, which mean something else in patterns."""
        net = nn.ParameterDict({"w[0]": nn.Parameter(torch.ones(40, 40)), "w1": nn.Parameter(torch.ones(40, 40))})
        sync = gradwire.Synchronizer(net, {"w[0]": "topk:route=sharded", "*": "qsgd:route=sharded"})
        assert [str(sync.engine.now.rule(name))[:4] for name in ("w[0]", "w1")] == ["topk", "qsgd"]
        for each in net.values():
            each.grad = torch.ones_like(each)
        sync.synchronize()
        gradwire.redistribute([sync.state_dict()], workers=2)
        sync.close()
        with pytest.raises(ConfigurationError, match=re.escape("no parameter matches the pattern '?[[]1]'")):
            gradwire.Synchronizer(net, {"?[[]1]": "topk", "*": "qsgd"})

    def test_a_last_pattern_may_be_for_nobody(self) -> None:
        """And one may match some that another takes."""
        mixed = {"embed": "topk", "?.*": "dense", "*.weight": "topk", "head": "dense", "*": "qsgd"}
        with pytest.raises(ConfigurationError, match=re.escape("no parameter matches the pattern 'c.weight'")):
            gradwire.Synchronizer(parameters(), {"c.weight": "topk", **mixed})
        sync = gradwire.Synchronizer(parameters(), mixed)
        assert [str(sync.engine.now.rule(name))[:5] for name in ("a.weight", "head")] == ["dense", "dense"]
        sync.close()

    def test_a_handle_changes_to_schedules(self) -> None:
        sync = gradwire.Synchronizer(parameters(), MIXED[0])
        sync.change({"embed": {0: "topk:ratio=0.25", 1: "topk:ratio=0.01"}, "*": "dense"})
        assert "{'embed': topk(ratio={0: 0.25, 1: 0.01}, " in repr(sync)
        assert str(sync.engine.now.rule("embed")).startswith("topk(ratio=0.25, ")
        sync.close()

    @pytest.mark.parametrize(
        ("mixed", "options", "message"),
        [
            ({"embed*": "topk"}, {}, "no pattern matches 'a.weight', 'a.bias', 'b.weight', 'head', 'c.bias'; add"),
            ({"embd*": "topk", "*": "qsgd"}, {}, "no parameter matches the pattern 'embd*'; leave it out"),
            ({"EMBED": "topk", "*": "qsgd"}, {}, "no parameter matches the pattern 'EMBED'"),
            (
                {"em[b]*": "topk", "e[x]*": "topk", "*": "qsgd"},
                {},
                "'head' and 1 more; a bracket stands for itself as [[]",
            ),
            ({"*": "dense", "embed": "topk"}, {}, "the pattern 'embed' never counts, because '*' before it matches"),
            ({"a.*": "topk", "*": "dense", "b.*": "topk"}, {}, "write it before '*', or leave it out"),
            ({}, {}, "is no mapping of patterns; write it as in"),
            ({3: "topk"}, {}, "is no mapping of patterns; write it as in"),
            ({"*": "topk"}, {"ratio": 0.1}, "options ['ratio'] came with a method for each of several patterns"),
            ({"*": "topk:ratio=2"}, {}, "ratio=2 is out of range"),
            ({"*": "topk:ratio"}, {}, "'ratio' is not option=value"),
            ({"*": "topk:ratio=0.1,ratio=0.1"}, {}, "'ratio' is written twice"),
            ({"*": {1: "topk"}}, {}, "method={1: 'topk'} is no schedule; write values by the step from which they"),
            ({"*": {0: "topk", 9: "qsgd"}}, {}, "from step 9 on qsgd(bits=4, "),
            ({"*": {0: "topk", 9: "topk:route=sharded"}}, {}, "is more than topk(ratio=0.01, values=fp32, "),
            ({"*": "topk:seed=3"}, {}, "'topk' has no option 'seed'"),
            ("topk:ratio=0.1", {"ratio": 0.1}, "came with ratio=0.1; write it with the method or give it, not both"),
            ("topk:memory=none", {"memory": "ef21"}, "came with memory='ef21'; write it with the method"),
            (
                {"e*": "topk:route=sharded", "*": "topk:route=gather,owner=qsgd:8"},
                {},
                "so no state could be saved; choose one route for all methods that keep it",
            ),
        ],
    )
    def test_what_cannot_be_is_said(self, mixed: Any, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            gradwire.Synchronizer(parameters(), mixed, **options)


def test_a_method_is_written_as_text() -> None:
    choices = Choices(seed=3)
    written = Configuration.of(
        "topk:ratio=0.1,values=qsgd:4,memory=ef21,route=sharded,granularity=block:64", {}, choices
    )
    given = Configuration.make("topk", {"ratio": 0.1, "values": "qsgd:4"}, "block:64", "sharded", memory="ef21", seed=3)
    assert written.describe() == given.describe()


def test_what_is_written_with_a_method_stands_before_what_all_have() -> None:
    mixture = configure({"a": "topk:memory=none", "*": "efsignsgd"}, {}, Choices(memory="ef21", seed=7))
    assert isinstance(mixture, Mixture)
    assert [str(rule.memory) for rule in mixture.rules] == ["none", str(gradwire.memory.EF21())]
    assert [rule.seed for rule in mixture.rules] == [7, 7]


def gradient(method: Methods, group: dist.ProcessGroup | None = None) -> list[dict[str, Tensor]]:
    model = DistributedDataParallel(network(), bucket_cap_mb=0.02, process_group=group)
    handle = gradwire.compress(model, method)
    found = []
    for step in range(3):
        inputs, labels = batch(dist.get_rank(), step)
        model.zero_grad()
        nn.functional.cross_entropy(model.eval()(inputs), labels).backward()
        found.append(
            {name: each.grad.clone() for name, each in model.module.named_parameters() if each.grad is not None}
        )
    handle.close()
    return found


@ranks(2)
def test_methods_share_the_buckets_of_a_model() -> None:
    """Other methods share the buckets, so nothing that depends on a bucket may be seen."""
    mixed = {"0.*": "topk:ratio=0.1", "*.weight": "acpsgd:rank=2", "*": "dense"}
    together = gradient(mixed)
    for pattern, method in mixed.items():
        names = [
            name
            for name in together[0]
            if configure(mixed, {}, Choices()).rule(name).describe() == configure(method, {}, Choices()).describe()
        ]
        assert names, pattern
        alone = gradient(method)
        for step in range(3):
            assert all(torch.equal(together[step][name], alone[step][name]) for name in names), (pattern, step)
    with pytest.raises(ConfigurationError, match=r"ranks differ: rank 0 has .patterns='0\.\*', '\*'., rank 1 has"):
        gradient({"0.*": "topk", "*": "qsgd"} if dist.get_rank() == 0 else {"1.*": "topk", "*": "qsgd"})
