"""What periodic averaging refuses, when it is attached or later, and changes nothing."""

from __future__ import annotations

import copy
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer

import gradwire
from gradwire import ConfigurationError
from local_training import nesterov, network, sgd, train
from models import flat, same_everywhere
from pool import ranks


def refused(message: str, net: nn.Module, optimizer: Any = None, **arguments: Any) -> None:
    before, taken = flat(net), optimizer if optimizer is not None else sgd(net)
    with pytest.raises(ConfigurationError, match=message):
        gradwire.periodic(taken, **arguments)
    assert torch.equal(flat(net), before)
    assert not getattr(taken, "_optimizer_step_post_hooks", None)


@ranks(1)
def test_attachments_that_are_refused() -> None:
    net, other = network(), network()
    refused("optimizer is a Sequential; give a torch.optim.Optimizer", net, net)
    refused("every=0 is out of range; choose a whole number of local steps >= 1", net, every=0)
    refused("every=2.5 is out of range", net, every=2.5)
    refused(r"every\(0\)=0 is out of range", net, every=lambda period: period)
    refused("fragments=9 is out of range; a period of every=8 local steps", net, fragments=9)
    refused("fragments=0 is out of range", net, fragments=0)
    refused("fragments=7 is out of range; 6 parameters cannot be cut into so many", net, fragments=7, cut="layers")
    refused("cut='rows' is not known; choose 'contiguous', 'strided', 'layers'", net, cut="rows")
    refused("delay=8 is out of range; choose fewer local steps", net, delay=8)
    refused("delay=-1 is out of range", net, delay=-1)
    refused("mix=0 is out of range; choose 0 < mix <= 1", net, mix=0)
    refused("mix=1.5 is out of range", net, mix=1.5)
    refused("mix='0.5' is out of range", net, mix="0.5")
    refused("mix=nan is out of range", net, mix=float("nan"))
    refused("eager='no' is not possible; choose True or False", net, eager="no")
    refused("delay=1 and mix=1.0 are not possible with eager=True", net, delay=1, eager=True)
    refused("moments='average' is not possible with eager=True", net, moments="average", eager=True)
    refused("moments='half' is not known; choose 'keep', 'reset', 'average'", net, moments="half")
    refused("buffers is a bool; give the module whose buffers are to be averaged", net, buffers=True)
    refused("warmup_steps=-1 is out of range", net, warmup_steps=-1)
    refused("moments='reset' starts whole parameters anew", net, moments="reset", fragments=2)
    fused = {"moments": "reset", "fragments": 2, "cut": "layers"}
    refused("momenta of some parameters at a time, and a fused SGD", net, sgd(net, momentum=0.9, fused=True), **fused)
    refused("'topkk' is not known; did you mean 'topk'", net, method="topkk")
    refused("is a method for each of several patterns.*give one for all", net, method={"*": "topk"})
    refused("ratio=2 is out of range", net, method="topk", ratio=2)
    refused("momentum of gradients", net, method="topk", memory="dgc")
    refused("momentum of gradients", net, method="signum")
    refused("averages of lion are no means of what local steps changed", net, method="lion")
    refused("averages of dion are no means", net, method="dion", outer=nesterov, warmup_steps=1)
    refused("'dense' has no option 'verify'; did you mean 'verify_every'", net, verify=True)
    refused("verify_every=-1 is out of range; choose a whole number of", net, verify_every=-1)
    refused("powersgd cannot work on cut='contiguous'", net, method="powersgd", fragments=2)
    refused("names 2 of the 6 that the optimizer has", net, parameters=list(net.named_parameters())[:2])
    refused("outer is an optimizer over 6 parameters of which 0", net, outer=sgd(other))
    refused("among the parameters given is a Parameter; give a module, or names", net, parameters=net.parameters())
    refused("two parameters have the name 'same'", net, parameters=[("same", each) for each in net.parameters()])
    local = sgd(net)
    refused("outer is the optimizer of the local steps itself", net, local, outer=local)
    refused("outer is a float; give", net, outer=0.7)
    refused("outer made a list", net, outer=lambda parameters: parameters)
    refused("outer made an optimizer over other tensors", net, outer=lambda parameters: nesterov(parameters[:1]))
    stepped = sgd(net, momentum=0.9)
    flat_before = copy.deepcopy(net.state_dict())
    train(net, stepped, range(1))
    net.load_state_dict(flat_before)
    refused("outer has taken steps already", net, outer=stepped)
    net.zero_grad()
    double = network().double()
    refused("dtype torch.float64", double)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("nodes", "local"))
    refused("device mesh of 2 dimensions", net, process_group=mesh)

    optimizer = sgd(net)
    handle = gradwire.periodic(optimizer)
    with pytest.raises(ConfigurationError, match="averaged periodically already"):
        gradwire.periodic(optimizer)
    assert "every=8" in repr(handle)
    handle.close()
    assert not optimizer._optimizer_step_post_hooks
    gradwire.periodic(optimizer).close()


class Wrapped(torch.optim.Optimizer):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = optimizer, optimizer.param_groups


@ranks(2)
def test_optimizers_whose_steps_are_not_local() -> None:
    net = network()
    refused("optimizer is a Wrapped, which never called Optimizer.__init__", net, Wrapped(sgd(net)))
    named = list(net.named_parameters())
    with closing(gradwire.optim.ZeroOneAdam(named, freeze_step=2)) as averaging:
        refused(r"is a ZeroOneAdam, whose steps ranks \[0, 1\] take together", net, averaging)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    for group in (None, alone):
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
        if group is None:
            refused("is a ZeroRedundancyOptimizer, whose steps ranks", net, optimizer)
        gradwire.periodic(optimizer, process_group=None if group else alone).close()


@ranks(2)
def test_optimizers_that_get_others() -> None:
    """A parameter that is stepped and not averaged is noticed with the next average, before anything is sent."""
    net = network()
    net[0].requires_grad_(False)
    optimizer = sgd(net)
    handle = gradwire.periodic(optimizer, every=2)
    train(net, optimizer, range(2))
    net[0].requires_grad_(True)
    with pytest.raises(ConfigurationError, match=r"'0\.0' was frozen when the method was attached"):
        train(net, optimizer, range(2, 4))
    handle.close()

    net = network()
    optimizer = sgd(net[2:])
    handle = gradwire.periodic(optimizer, every=2)
    train(net, optimizer, range(2))
    optimizer.add_param_group({"params": list(net[0].parameters())})
    with pytest.raises(ConfigurationError, match="the optimizer has 6 parameters, others than the 4"):
        train(net, optimizer, range(2, 4))
    assert handle.syncs == 1
    handle.close()


@ranks(2)
def test_models_that_differ() -> None:
    rank = dist.get_rank()
    net = network()
    with torch.no_grad():
        net[2].weight[0, 0] += rank == 1
    named = list(net.named_parameters())
    refused("'2.weight' has other values on rank 1 than on rank 0.*broadcast=True", net, parameters=named)
    refused("rank 0 has 'every=4', rank 1 has 'every=5'", net, every=4 + rank)
    refused("rank 0 has 'outer=none', rank 1 has 'outer=made by a function'", net, outer=nesterov if rank else None)
    if rank == 1:
        net.to(memory_format=torch.contiguous_format)
    net.register_buffer("places", torch.arange(4, dtype=torch.int16) + rank)  # gloo has no such numbers
    gradwire.periodic(sgd(net), broadcast=True, buffers=net, mix=1 if rank else 1.0).close()
    assert same_everywhere(flat(net))
    assert torch.equal(net.places, torch.arange(4, dtype=torch.int16))
    assert torch.equal(flat(net), flat(network()))


@ranks(2)
def test_beginnings_that_differ() -> None:
    """Told at once, where ranks would wait for one another's other collectives."""
    rank = dist.get_rank()
    net = network()
    net.register_buffer("count", torch.zeros(3 + rank))
    refused("rank 0 has 'broadcast=True', rank 1 has 'broadcast=False'", net, broadcast=rank == 0)
    for broadcast in (False, True):
        refused(r"rank 1 has 'nothing'", net, buffers=None if rank else net, broadcast=broadcast)
        refused(r"has 'buffer count with shape \(3,\).*with shape \(4,\)", net, buffers=net, broadcast=broadcast)


@ranks(2)
def test_outer_optimizers_that_differ() -> None:
    """Also those that a function makes, by which ranks would part company with the first average."""
    rank = dist.get_rank()

    def halves(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        groups = [{"params": parameters[: 2 + rank], "lr": 0.5}, {"params": parameters[2 + rank :], "lr": 0.8}]
        return torch.optim.SGD(groups)

    def slower(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=torch.tensor(0.5 + 0.25 * rank))

    def other(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(parameters) if rank else nesterov(parameters)

    def marked(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters, "mark": object(), "by": lambda: rank}], lr=0.5)

    net = network()
    refused("outer group 0 of SGD with 2 tensors.*outer group 0 of SGD with 3 tensors", net, outer=halves)
    refused("outer group 0 of SGD.*'lr': '0.5'.*outer group 0 of SGD.*'lr': '0.75'", net, outer=slower)
    refused("outer group 0 of SGD.*outer group 0 of Adagrad", net, outer=other)
    gradwire.periodic(sgd(net), outer=marked).close()


@ranks(2)
def test_parameters_that_came_later() -> None:
    """Those added to the optimizer, or unfrozen, are in no average: nobody goes on as if they were."""
    for unfreeze in (False, True):
        net, more = network(), nn.Linear(3, 2)
        optimizer = sgd(net)
        if unfreeze:
            net[0].requires_grad_(False)
        handle = gradwire.periodic(optimizer, every=2)
        train(net, optimizer, range(2))
        if unfreeze:
            net[0].requires_grad_(True)
        else:
            optimizer.add_param_group({"params": more.parameters()})
        optimizer.step()
        before = flat(net)
        message = (
            "'0.0' was frozen when the method" if unfreeze else "the optimizer has 8 parameters, others than the 6"
        )
        with pytest.raises(ConfigurationError, match=message):
            handle.synchronize()
        with pytest.raises(ConfigurationError, match=message):
            optimizer.step()
        assert handle.stats().wire_bytes > 0
        assert flat(net).shape == before.shape
        handle.close()
        again = gradwire.periodic(optimizer, every=2, outer=nesterov, broadcast=True)
        train(net, optimizer, range(2))
        assert same_everywhere(flat(net))
        net[0].requires_grad_(False)
        with pytest.raises(ConfigurationError, match=r"'0\.0' was trained when averaging began and is frozen now"):
            again.synchronize()
        again.close()
