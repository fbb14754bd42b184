"""The ways people train: each works, and gives what it should, or is refused with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire import ConfigurationError
from models import flat, same_everywhere
from pool import Pool

# A linear, a sparse, a low-rank and a quantising method, with and without memories, on all routes and scopes.
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("dense", {}),
    ("topk", {"ratio": 0.05}),
    ("acpsgd", {"rank": 2}),
    ("efsignsgd", {"route": "sharded"}),
    ("qsgd", {"bits": 8, "granularity": "model"}),
]


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 80), nn.ReLU(), nn.Linear(80, 10))


def inputs(step: int, rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, 48, generator=torch.Generator().manual_seed(1000 * dist.get_rank() + step))


class Trained:
    """A model in several buckets, its handle and optimizer."""

    def __init__(self, net: nn.Module, method: str = "topk", *, cap: float = 0.02, **arguments: Any) -> None:
        options = {} if method != "topk" else {"ratio": 0.05}
        ddp = {key: arguments.pop(key) for key in list(arguments) if key in DDP_ARGUMENTS}
        self.model = DistributedDataParallel(net, bucket_cap_mb=cap, **ddp)  # type: ignore[arg-type]
        self.handle = gradwire.compress(self.model, method, **(options | arguments))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def step(self, *losses: Callable[[], torch.Tensor]) -> None:
        """One optimizer step; all but the last loss are accumulated without synchronisation."""
        self.optimizer.zero_grad()
        with self.model.no_sync():
            for loss in losses[:-1]:
                loss().backward()
        losses[-1]().backward()
        self.optimizer.step()

    def end(self, steps: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        assert self.handle.stats().steps == steps
        weights = flat(self.model)
        assert weights.isfinite().all()
        assert same_everywhere(weights, group)
        self.handle.close()
        return weights


DDP_ARGUMENTS = ("gradient_as_bucket_view", "find_unused_parameters", "static_graph", "process_group")


def mean_square(
    model: Any, step: int, *further: Any, rows: int = 16, weight: float = 1.0
) -> Callable[[], torch.Tensor]:
    return lambda: model(inputs(step, rows), *further).square().mean() * weight


def total(losses: list[Callable[[], torch.Tensor]]) -> torch.Tensor:
    return torch.stack([loss() for loss in losses]).sum()


def accumulation() -> None:
    for method, options in METHODS:
        results = []
        for view in (False, True):
            accumulated = Trained(network(), method, gradient_as_bucket_view=view, **options)
            for step in range(4):
                accumulated.step(*(mean_square(accumulated.model, 10 * step + micro) for micro in range(3)))
            results.append(accumulated.end(4))
        assert torch.equal(*results)
    at_once = Trained(network(), "acpsgd", rank=2)
    accumulated = Trained(network(), "acpsgd", rank=2)
    for step in range(2):
        together = [mean_square(at_once.model, 10 * step + micro) for micro in range(3)]
        at_once.step(partial(total, together))
        accumulated.step(*(mean_square(accumulated.model, 10 * step + each) for each in range(3)))
    torch.testing.assert_close(at_once.end(2), accumulated.end(2), rtol=1e-3, atol=1e-6)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(48, 40), nn.Linear(48, 40)

    def forward(self, values: torch.Tensor, which: int) -> torch.Tensor:
        return (self.second if which else self.first)(values)  # type: ignore[no-any-return]


def unused_parameters() -> None:
    for method, options in METHODS:
        trained = Trained(Branches(), method, cap=0.002, find_unused_parameters=True, **options)
        for step in range(8):  # first every rank another branch, then all the same one
            which = (step + dist.get_rank()) % 2 if step < 4 else 1
            trained.step(mean_square(trained.model, step, which))
        trained.end(8)


def static_graph() -> None:
    for method, options in METHODS:
        trained = Trained(network(), method, static_graph=True, **options)
        for step in range(4):
            trained.step(mean_square(trained.model, step))
        trained.end(4)


def frozen_and_frozen_later() -> None:
    net = network()
    net[0].requires_grad_(False)
    trained = Trained(net)
    before = net[0].weight.clone()
    for step in range(3):
        trained.step(mean_square(trained.model, step))
    assert torch.equal(before, net[0].weight)
    trained.end(3)

    net = network()
    trained = Trained(net, find_unused_parameters=True)
    for step in range(9):
        net[0].requires_grad_(not 3 <= step < 6)
        if step == 3:
            before = net[0].weight.clone()
        trained.step(mean_square(trained.model, step))
        if step == 5:
            assert torch.equal(before, net[0].weight)
    assert not torch.equal(before, net[0].weight)
    trained.end(9)


def unfrozen_later() -> None:
    for granularity in ("layer", "model"):
        net = network()
        net[0].requires_grad_(False)
        trained = Trained(net, granularity=granularity)
        trained.step(mean_square(trained.model, 0))
        net[0].requires_grad_(True)
        net.zero_grad()
        anew = Trained(net, granularity=granularity)
        anew.step(mean_square(anew.model, 1))
        assert same_everywhere(net[0].weight.grad)
        anew.end(1)
        trained.handle.close()

        net = network()
        net[0].requires_grad_(False)
        trained = Trained(net, granularity=granularity)
        trained.step(mean_square(trained.model, 0))
        net[0].requires_grad_(True)
        with pytest.raises(ConfigurationError, match=r"parameter '0.weight' was frozen when the method was attached"):
            trained.step(mean_square(trained.model, 1))
        trained.handle.close()


def parameters_that_ddp_ignores() -> None:
    for granularity in ("layer", "model"):
        net = network()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.weight"])
        trained = Trained(net, granularity=granularity)
        trained.step(mean_square(trained.model, 0))
        assert same_everywhere(net[2].weight.grad)
        trained.handle.close()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.read, self.write = nn.Embedding(50, 40), nn.Linear(40, 50, bias=False)
        self.write.weight = self.read.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.write(self.read(tokens))  # type: ignore[no-any-return]


def shared_parameters() -> None:
    for method, options in METHODS:
        trained = Trained(Tied(), method, **options)
        for step in range(4):
            tokens = torch.randint(50, (9,), generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))
            trained.optimizer.zero_grad()
            trained.model(tokens).square().mean().backward()
            trained.optimizer.step()
        trained.end(4)
    tied = Tied()
    with pytest.raises(ConfigurationError, match=r"'write.weight' is the parameter 'read.weight' under another name"):
        gradwire.Synchronizer(tied.named_parameters(remove_duplicate=False), "topk")
    two = [*network().named_parameters(), *network().named_parameters()]
    with pytest.raises(ConfigurationError, match=r"two parameters have the name '0.weight'"):
        gradwire.Synchronizer(two, "topk")


def uneven_inputs() -> None:
    """A rank that has joined gives zeros, so that the others' steps are as if it still trained on nothing."""
    for method, options in METHODS:
        for own_steps in (0, 2):
            steps = own_steps if dist.get_rank() == 0 else 5
            joined = Trained(network(), method, **options)
            with joined.model.join():
                for step in range(steps):
                    joined.step(mean_square(joined.model, step))
            zeros = Trained(network(), method, **options)
            for step in range(5):
                zeros.step(mean_square(zeros.model, step, weight=float(step < steps)))
            assert torch.equal(joined.end(5), zeros.end(5)), method


def clipping() -> None:
    for method, options in METHODS:
        trained = Trained(network(), method, **options)
        for step in range(4):
            trained.optimizer.zero_grad()
            mean_square(trained.model, step)().backward()
            assert nn.utils.clip_grad_norm_(trained.model.parameters(), 0.01) > 0.01
            trained.optimizer.step()
        trained.end(4)


def compiled() -> None:
    expected = Trained(network(), cap=25)
    for step in range(4):
        expected.step(mean_square(expected.model, step))
    weights = expected.end(4)
    before = Trained(torch.compile(network(), backend="aot_eager"), cap=25)  # type: ignore[arg-type]
    after = Trained(network(), cap=25)
    compiled_model = torch.compile(after.model, backend="aot_eager")
    for step in range(4):
        before.step(mean_square(before.model, step))
        after.step(mean_square(compiled_model, step))
    torch.testing.assert_close(before.end(4), weights, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after.end(4), weights, rtol=1e-4, atol=1e-5)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.net, self.reentrant = network(), reentrant

    def forward(self, values: torch.Tensor) -> Any:
        if self.reentrant is None:
            return self.net(values)
        half = checkpoint(self.net[:3], values.requires_grad_(), use_reentrant=self.reentrant)
        return checkpoint(self.net[3:], half, use_reentrant=self.reentrant)


def checkpointing() -> None:
    for method, options in METHODS:
        weights = []
        for reentrant, static in [(None, False), (False, False), (True, False), (True, True)]:
            trained = Trained(Checkpointed(reentrant), method, static_graph=static, **options)
            for step in range(3):
                trained.step(mean_square(trained.model, step))
            weights.append(trained.end(3))
        assert all(torch.equal(weights[0], other) for other in weights[1:]), method


def autocast() -> None:
    for method, options in METHODS:
        trained = Trained(network(), method, **options)

        for step in range(4):
            trained.step(torch.autocast("cpu", torch.bfloat16)(mean_square(trained.model, step)))
        trained.end(4)


def changing_batches_and_evaluation() -> None:
    trained = Trained(network())
    for step in range(4):
        trained.step(mean_square(trained.model, step, rows=1 + 3 * step + dist.get_rank()))
        trained.model.eval()
        with torch.no_grad():
            for _ in range(1 + dist.get_rank()):  # as often as each rank likes
                trained.model(inputs(step))
        trained.model.train()
    trained.end(4)


def two_losses_of_one_forward() -> None:
    """Two backward passes through one forward are not averaged by DDP itself; the backward pass of their sum is."""
    trained = Trained(network())
    for step in range(4):

        def loss(step: int = step) -> torch.Tensor:
            outputs = trained.model(inputs(step))
            return outputs.square().mean() + outputs.abs().mean()  # type: ignore[no-any-return]

        trained.step(loss)
    trained.end(4)
    net = network()
    sync = gradwire.Synchronizer(net.named_parameters(), "topk", ratio=0.05)
    outputs = net(inputs(0))
    outputs.square().mean().backward(retain_graph=True)
    outputs.abs().mean().backward()
    sync.synchronize()
    assert same_everywhere(net[0].weight.grad)
    sync.close()


def gradients_with_a_graph() -> None:
    """In one's own loop: the same bits as without, and averages have no part in the graph."""
    for method, options in METHODS:
        averages = []
        for graph in (False, True):
            net = network()
            sync = gradwire.Synchronizer(net, method, **options)
            for step in range(3):
                net.zero_grad()
                mean_square(net, step)().backward(create_graph=graph)
                sync.synchronize()
            averages.append(
                torch.cat([each.grad.detach().reshape(-1) for each in net.parameters() if each.grad is not None])
            )
            net.zero_grad()
            sync.close()
        assert same_everywhere(averages[0])
        assert torch.equal(*averages), method


def in_inference_mode() -> None:
    """Where no graph is kept at all gradients are averaged, too, and missing ones can be written to later."""
    net = Branches()
    sync = gradwire.Synchronizer(net, "topk", ratio=0.05)
    for step in range(4):
        net.zero_grad(set_to_none=step == 0)
        net(inputs(step), step % 2).square().mean().backward()
        with torch.inference_mode():
            sync.synchronize()
        assert same_everywhere(torch.cat([each.grad.reshape(-1) for each in net.parameters() if each.grad is not None]))
    sync.close()


def own_loop_with_missing_gradients() -> None:
    for method, options in METHODS:
        net = Branches()
        sync = gradwire.Synchronizer(net.named_parameters(), method, **options)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for step in range(6):
            optimizer.zero_grad()
            if step != 3 or dist.get_rank() == 0:  # in step 3 a rank has no data at all
                net(inputs(step), (step + dist.get_rank()) % 2).square().mean().backward()
            if step == 5:
                net.second.requires_grad_(False)
                before = net.second.weight.clone()
                optimizer.zero_grad()
            sync.synchronize()
            optimizer.step()
        assert torch.equal(before, net.second.weight)
        assert same_everywhere(flat(net))
        sync.close()
    net = Branches()
    net.second.requires_grad_(False)
    sync = gradwire.Synchronizer(net.named_parameters(), "topk")
    sync.synchronize()
    net.second.requires_grad_(True)
    with pytest.raises(ConfigurationError, match=r"parameter 'second.weight' was frozen when the method was attached"):
        sync.synchronize()
    sync.close()


def one_model_through_another() -> None:
    """A generator's step, whose backward pass makes gradients of the discriminator that nobody wants."""
    for method, options in METHODS:
        ends = []
        for frozen in (False, True):
            generator, judge = Trained(network(), method, **options), Trained(nn.Linear(10, 40), method, **options)
            for step in range(4):
                made = generator.model(inputs(step))
                judge.step(lambda made=made, judge=judge: judge.model(made.detach()).square().mean())
                generator.optimizer.zero_grad()
                if frozen:
                    weights = {name: each.detach() for name, each in judge.model.module.named_parameters()}
                    said = torch.func.functional_call(judge.model.module, weights, made)
                    (said - 1).square().mean().backward()
                else:
                    with judge.model.no_sync():
                        (judge.model(made) - 1).square().mean().backward()
                generator.optimizer.step()
            ends.append(torch.cat([generator.end(4), judge.end(4)]))
        assert torch.equal(*ends), method


WAYS = [
    accumulation,
    unused_parameters,
    static_graph,
    frozen_and_frozen_later,
    unfrozen_later,
    parameters_that_ddp_ignores,
    shared_parameters,
    uneven_inputs,
    clipping,
    compiled,
    checkpointing,
    autocast,
    changing_batches_and_evaluation,
    two_losses_of_one_forward,
    gradients_with_a_graph,
    in_inference_mode,
    own_loop_with_missing_gradients,
    one_model_through_another,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_way_of_training(pool: Pool, way: Callable[[], None]) -> None:
    pool.run(2, way)


def groups_that_overlap() -> None:
    """Rank 1 trains two models with different others; nobody waits for who has no part in it."""
    members = {"first": [0, 1], "second": [1, 2]}
    groups = {name: dist.new_group(ranks) for name, ranks in members.items()}
    trained = {
        name: Trained(network(), "topk" if name == "first" else "efsignsgd", process_group=groups[name])
        for name, ranks in members.items()
        if dist.get_rank() in ranks
    }
    for step in range(4):
        for each in trained.values():
            each.step(mean_square(each.model, step))
    for name, each in trained.items():
        each.end(4, groups[name])


def test_groups_that_overlap(pool: Pool) -> None:
    pool.run(3, groups_that_overlap)


def refused_by_ddp_or_gradwire() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        DistributedDataParallel(nn.Linear(40, 40, device="meta"))
    model = DistributedDataParallel(nn.EmbeddingBag(9, 4, sparse=True, mode="sum"))
    with pytest.raises(ConfigurationError, match="sparse=True; gradwire averages dense gradients only"):
        gradwire.compress(model, "topk")


def test_what_is_refused(pool: Pool) -> None:
    pool.run(2, refused_by_ddp_or_gradwire)
