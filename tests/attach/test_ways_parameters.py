"""Which parameters have gradients, of some ranks or at some times: what is averaged is right, or it is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import ConfigurationError
from models import flat, same_everywhere
from pool import ranks
from trained import METHODS, Branches, Trained, inputs, mean_square, network


@ranks(2)
def test_unused_parameters() -> None:
    for method, options in METHODS:
        trained = Trained(Branches(), method, cap=0.002, find_unused_parameters=True, **options)
        for step in range(8):  # first every rank another branch, then all the same one
            which = (step + dist.get_rank()) % 2 if step < 4 else 1
            trained.step(mean_square(trained.model, step, which))
        trained.end(8)


@ranks(2)
def test_frozen_and_frozen_later() -> None:
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


@ranks(2)
def test_unfrozen_later() -> None:
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


@ranks(2)
def test_changed_between_wrapping_and_attaching() -> None:
    """DDP averages what required gradients when it wrapped the model; it says nothing of what does since."""
    for change, message in (
        (
            lambda net: net[0].requires_grad_(True),
            r"parameter '0.weight' was frozen, or was not there, when DDP wrapped",
        ),
        (lambda net: net.append(nn.Linear(10, 4)), r"parameter '5.weight' was frozen, or was not there"),
        (lambda net: net[2].requires_grad_(False), r"DDP wrapped 4 parameters .* of these 2 are there"),
    ):
        net = network()
        net[0].requires_grad_(False)
        model = DistributedDataParallel(net, find_unused_parameters=True)
        change(net)
        with pytest.raises(ConfigurationError, match=message):
            gradwire.compress(model, "topk")
    Trained(net).handle.close()


@ranks(2)
def test_parameters_that_ddp_ignores() -> None:
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


@ranks(2)
def test_shared_parameters() -> None:
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


@ranks(2)
def test_uneven_inputs() -> None:
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


@ranks(2)
def test_own_loop_with_missing_gradients() -> None:
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


@ranks(2)
def test_own_loop_with_gradients_of_another_dtype() -> None:
    """As ``grad_dtype`` has them: a missing one is made as the others are."""
    parameters = [(name, nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16))) for name in ("first", "second")]
    for _, each in parameters:
        each.grad_dtype = torch.float32
    for method, options in METHODS:
        sync = gradwire.Synchronizer(parameters, method, **options)
        for number, (_, each) in enumerate(parameters):
            each.grad = torch.randn(64, 64) if number != dist.get_rank() else None
        sync.synchronize()
        for name, each in parameters:
            assert each.grad is not None, (method, name)
            assert each.grad.dtype == torch.float32, (method, name)
            assert same_everywhere(each.grad), (method, name)
        sync.close()


@ranks(2)
def test_own_loop_with_gradients_that_share_memory() -> None:
    """As ``torch.autograd.grad`` gives them: one number for all elements of a sum, one tensor for both its terms."""
    names, parameters = ("first", "second"), [nn.Parameter(torch.zeros(64, 64)) for _ in range(2)]
    for method, options in METHODS:
        given = torch.autograd.grad((dist.get_rank() + 1) * torch.add(*parameters).sum(), parameters)
        assert given[0].stride() == (0, 0)
        assert given[0].data_ptr() == given[1].data_ptr()
        expected, sync = (gradwire.Synchronizer(zip(names, parameters, strict=True), method, **options) for _ in "ab")
        averages = expected.average(dict(zip(names, given, strict=True)))
        for parameter, gradient in zip(parameters, given, strict=True):
            parameter.grad = gradient
        sync.synchronize()
        for name, parameter in zip(names, parameters, strict=True):
            assert torch.equal(parameter.grad, averages[name]), (method, name)
        expected.close()
        sync.close()


class Places(nn.Module):
    """Places beside tokens of two kinds: autograd gives all three views of one gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.places = nn.Parameter(torch.randn(32, 48))
        self.first, self.second = (nn.Parameter(torch.randn(16, 48)) for _ in range(2))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([self.first, self.second])
        return (self.places.unsqueeze(0) + tokens.unsqueeze(0)).squeeze(0) * torch.cat([values, 2 * values])


@ranks(2)
def test_gradients_in_parts_of_one_tensor() -> None:
    """In DDP's own buckets they are apart."""
    for method, options in METHODS:
        for static in (False, True):
            weights = []
            for view in (False, True):
                trained = Trained(Places(), method, gradient_as_bucket_view=view, static_graph=static, **options)
                for step in range(4):
                    trained.step(mean_square(trained.model, step))
                weights.append(trained.end(4))
            assert torch.equal(*weights), (method, static)

        net = Places()
        expected, sync = (gradwire.Synchronizer(net, method, **options) for _ in "ab")
        for step in range(4):
            net.zero_grad()
            mean_square(net, step)().backward()
            assert net.second.grad is not None
            assert net.second.grad.untyped_storage().data_ptr() == net.places.grad.untyped_storage().data_ptr()
            averages = expected.average({name: each.grad.clone() for name, each in net.named_parameters()})
            sync.synchronize()
            for name, each in net.named_parameters():
                assert torch.equal(each.grad, averages[name]), (method, name)
        expected.close()
        sync.close()


@ranks(2)
def test_own_loop_with_gradients_whose_elements_share_memory_in_parts() -> None:
    """And with some that lie apart in one tensor, which stay there."""
    flat = nn.Parameter(torch.zeros(40)), nn.Parameter(torch.zeros(4, 10)), nn.Parameter(torch.zeros(0))
    parameters = {"unfolded": nn.Parameter(torch.zeros(64, 64)), **{f"flat {n}": each for n, each in enumerate(flat)}}
    for method, options in METHODS:
        expected, sync = (gradwire.Synchronizer(parameters.items(), method, **options) for _ in "ab")
        buffer = torch.randn(80)
        given = torch.randn(127).unfold(0, 64, 1), buffer[:40], buffer[40:].view(10, 4).t(), buffer[40:40]
        averages = expected.average(dict(zip(parameters, (each.clone() for each in given), strict=True)))
        for each, gradient in zip(parameters.values(), given, strict=True):
            each.grad = gradient
        sync.synchronize()
        for name, each in parameters.items():
            assert torch.equal(each.grad, averages[name]), (method, name)
        assert torch.equal(buffer[:40], averages["flat 0"])
        assert torch.equal(buffer[40:].view(10, 4).t(), averages["flat 1"])
        expected.close()
        sync.close()
