"""The ways people train: each works, and gives what it should, or is refused with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire import ConfigurationError
from gradwire.attach.ddp_buckets import Collected
from models import same_everywhere
from pool import ranks
from trained import METHODS, Branches, Trained, inputs, mean_square, network


def total(losses: list[Callable[[], torch.Tensor]]) -> torch.Tensor:
    return torch.stack([loss() for loss in losses]).sum()


@ranks(2)
def test_accumulation() -> None:
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


@ranks(2)
def test_averages_of_the_whole_model_are_where_ddp_looks_for_them() -> None:
    """In its buckets where gradients are views of them, so that it copies no parameter by itself."""
    handed: list[tuple[Any, torch.Tensor]] = []

    def on_bucket(self: Collected, bucket: dist.GradBucket, last: bool, usual: Any = Collected.on_bucket) -> Any:
        handed.append((usual(self, bucket, last), bucket.buffer()))
        return handed[-1][0]

    weights = []
    for view in (False, True):
        trained = Trained(network(), granularity="model", gradient_as_bucket_view=view)
        with mock.patch.object(Collected, "on_bucket", on_bucket):
            for step in range(5):
                handed.clear()
                trained.step(mean_square(trained.model, step))
        assert len(handed) > 1
        for future, buffer in handed:
            assert (future.value().data_ptr() == buffer.data_ptr()) == view
        weights.append(trained.end(5))
    assert torch.equal(*weights)


@ranks(2)
def test_static_graph() -> None:
    for method, options in METHODS:
        trained = Trained(network(), method, static_graph=True, **options)
        for step in range(4):
            trained.step(mean_square(trained.model, step))
        trained.end(4)


class TwoTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(48, 96), nn.Linear(96, 40, dtype=torch.bfloat16)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(values).bfloat16()).float()  # type: ignore[no-any-return]


@ranks(2)
def test_a_static_graph_of_several_buckets() -> None:
    """In its first step DDP counts no buckets, of which there is one for each dtype."""
    for method, options in METHODS:
        trained = Trained(TwoTypes(), method, static_graph=True, **options)
        for step in range(4):
            trained.step(mean_square(trained.model, step))
        assert len(trained.model.reducer._get_zeros_like_grad_buckets()) > 1
        trained.end(4)


@ranks(2)
def test_clipping() -> None:
    for method, options in METHODS:
        trained = Trained(network(), method, **options)
        for step in range(4):
            trained.optimizer.zero_grad()
            mean_square(trained.model, step)().backward()
            assert nn.utils.clip_grad_norm_(trained.model.parameters(), 0.01) > 0.01
            trained.optimizer.step()
        trained.end(4)


@ranks(2)
def test_optimizers_that_share_out_parameters() -> None:
    for method, options in METHODS:
        weights = []
        for shared in (False, True):
            trained = Trained(network(), method, **options)
            if shared:
                trained.optimizer = ZeroRedundancyOptimizer(trained.model.parameters(), torch.optim.SGD, lr=0.05)
            for step in range(4):
                trained.step(mean_square(trained.model, step))
            weights.append(trained.end(4))
        assert torch.equal(*weights), method


@ranks(2)
def test_optimizers_that_call_a_closure() -> None:
    for method, options in METHODS:
        trained, losses = Trained(network(), method, **options), []
        optimizer = torch.optim.LBFGS(trained.model.parameters(), lr=0.05, max_iter=4)

        def closure(step: int, trained: Any = trained, optimizer: Any = optimizer, losses: Any = losses) -> float:
            optimizer.zero_grad()
            loss = mean_square(trained.model, step)()
            loss.backward()
            averaged = loss.detach().clone()
            dist.all_reduce(averaged)
            losses.append(averaged.item() / dist.get_world_size())
            return float(losses[-1])

        for step in range(4):
            optimizer.step(partial(closure, step))
        assert len(losses) > 4
        assert same_everywhere(torch.tensor(losses))
        trained.end(len(losses))


@ranks(2)
def test_compiled() -> None:
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


@ranks(2)
def test_a_step_that_is_compiled_as_a_whole_is_cut_where_it_averages() -> None:
    from torch._dynamo.convert_frame import register_bytecode_hook

    def weights(wrap: Callable[..., Any]) -> torch.Tensor:
        net = network()
        sync = gradwire.Synchronizer(net, "topk", ratio=0.1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(number: int) -> None:
            optimizer.zero_grad()
            mean_square(net, number)().backward()
            sync.synchronize()
            sync.average({name: each.detach() for name, each in net.named_parameters()})
            optimizer.step()

        taken = wrap(step)
        for number in range(4):
            taken(number)
        return torch.cat([each.detach().flatten() for each in net.parameters()])

    files: list[str] = []
    hook = register_bytecode_hook(lambda traced, _: files.append(traced.co_filename))
    found = weights(partial(torch.compile, backend="eager"))
    hook.remove()
    assert torch.equal(found, weights(lambda step: step))
    assert __file__ in files
    assert not [each for each in files if "/gradwire/" in each]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.net, self.reentrant = network(), reentrant

    def forward(self, values: torch.Tensor) -> Any:
        if self.reentrant is None:
            return self.net(values)
        half = checkpoint(self.net[:3], values.requires_grad_(), use_reentrant=self.reentrant)
        return checkpoint(self.net[3:], half, use_reentrant=self.reentrant)


@ranks(2)
def test_checkpointing() -> None:
    for method, options in METHODS:
        weights = []
        for reentrant, static in [(None, False), (False, False), (True, False), (True, True)]:
            trained = Trained(Checkpointed(reentrant), method, static_graph=static, **options)
            for step in range(3):
                trained.step(mean_square(trained.model, step))
            weights.append(trained.end(3))
        assert all(torch.equal(weights[0], other) for other in weights[1:]), method


@ranks(2)
def test_autocast() -> None:
    for method, options in METHODS:
        trained = Trained(network(), method, **options)

        for step in range(4):
            trained.step(torch.autocast("cpu", torch.bfloat16)(mean_square(trained.model, step)))
        trained.end(4)


@ranks(2)
def test_changing_batches_and_evaluation() -> None:
    trained = Trained(network())
    for step in range(4):
        trained.step(mean_square(trained.model, step, rows=1 + 3 * step + dist.get_rank()))
        trained.model.eval()
        with torch.no_grad():
            for _ in range(1 + dist.get_rank()):  # as often as each rank likes
                trained.model(inputs(step))
        trained.model.train()
    trained.end(4)


@ranks(2)
def test_two_losses_of_one_forward() -> None:
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


@ranks(2)
def test_gradients_with_a_graph() -> None:
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


@ranks(2)
def test_in_inference_mode() -> None:
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


@ranks(2)
def test_one_model_through_another() -> None:
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


@ranks(3)
def test_groups_that_overlap() -> None:
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


@ranks(2)
def test_what_is_refused() -> None:
    with pytest.raises(RuntimeError, match="meta"):
        DistributedDataParallel(nn.Linear(40, 40, device="meta"))
    model = DistributedDataParallel(nn.EmbeddingBag(9, 4, sparse=True, mode="sum"))
    with pytest.raises(ConfigurationError, match="sparse=True; gradwire averages dense gradients only"):
        gradwire.compress(model, "topk")


@ranks(2)
def test_scripted_models() -> None:
    expected = Trained(network())
    scripted = Trained(torch.jit.script(network()))
    for step in range(3):
        for trained in (expected, scripted):
            trained.step(mean_square(trained.model, step))
    torch.testing.assert_close(scripted.end(3), expected.end(3))
