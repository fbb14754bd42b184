"""What DDP leaves to each rank without a word is told."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

import gradwire
from gradwire import ConfigurationError
from pool import Pool

Body = Callable[[DistributedDataParallel], object]


class Casting(nn.Sequential):
    """Layers may have any dtype."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for each in self:
            values = each(values.to(each.weight.dtype) if isinstance(each, nn.Linear) else values)
        return values


def network() -> Casting:
    torch.manual_seed(3)
    return Casting(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 30))


def inputs(step: int = 0) -> torch.Tensor:
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))


def same_everywhere(tensor: torch.Tensor) -> bool:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return all(torch.equal(each, tensor) for each in found)


def converted_later() -> None:
    """Plain DDP goes on, and ranks drift apart."""
    for part, finds in ((None, False), (None, True), (0, True)):
        model = DistributedDataParallel(network(), find_unused_parameters=finds)
        with closing(gradwire.compress(model, "topk")):
            (model if part is None else model.module[part]).to(torch.bfloat16)
            with pytest.raises(
                ConfigurationError, match=r"was torch.float32 on cpu when DDP wrapped it and is torch.bf"
            ):
                model(inputs()).float().sum().backward()


def added_later() -> None:
    model = DistributedDataParallel(network())
    with closing(gradwire.compress(model, "topk")):
        model.module.append(nn.Linear(30, 8).requires_grad_(False))
        model(inputs()).sum().backward()
        model.module[3].requires_grad_(True)
        with pytest.raises(ConfigurationError, match=r"'3.weight' was frozen when the method was attached"):
            model(inputs()).sum().backward()
    model = DistributedDataParallel(network())
    with closing(gradwire.compress(model, "topk")):
        model(inputs()).sum().backward()
        model.module.append(nn.Linear(30, 8))
        with pytest.raises(ConfigurationError, match=r"'3.weight' is new since DDP wrapped the model"):
            model(inputs()).sum().backward()


def renamed() -> None:
    """Pruning keeps the parameter, under another name; memories go on under the first one."""
    model = DistributedDataParallel(network())
    with closing(gradwire.compress(model, "topk")) as handle:
        model(inputs()).sum().backward()
        prune.l1_unstructured(model.module[0], "weight", 0.5)  # type: ignore[no-untyped-call]
        model(inputs(1)).sum().backward()
        assert same_everywhere(model.module[0].weight_orig.grad)
        assert handle.stats().steps == 2


@contextmanager
def listening() -> Iterator[list[str]]:
    """What rank 0 logs meanwhile."""
    lines: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gradwire")
    logger.addHandler(listener)
    try:
        yield lines
    finally:
        logger.removeHandler(listener)
    lines[:] = [line for line in lines if "still preparing" not in line] if dist.get_rank() == 0 else []


def said(body: Body, finds: bool) -> list[str]:
    """What rank 0 logs when three steps go so."""
    model = DistributedDataParallel(network(), find_unused_parameters=finds)
    with listening() as lines, closing(gradwire.compress(model, "topk")):
        for _ in range(3):
            model.zero_grad()
            body(model)
    return lines


def twice(model: DistributedDataParallel) -> None:
    outputs = model(inputs())
    outputs.sum().backward(retain_graph=True)
    outputs.abs().sum().backward()


def accumulated(model: DistributedDataParallel) -> None:
    with model.no_sync():
        model(inputs()).sum().backward()
    model(inputs(1)).sum().backward()


def accumulated_by_forward(model: DistributedDataParallel) -> None:
    """DDP goes by the forward pass."""
    with model.no_sync():
        outputs = model(inputs())
    outputs.sum().backward()
    model(inputs(1)).sum().backward()


def evaluated(model: DistributedDataParallel) -> None:
    model(inputs()).sum().backward()
    with torch.no_grad():
        model.module(inputs())
    torch.autograd.grad(model.module(inputs()).sum(), list(model.parameters()))
    copy.deepcopy(model).module(inputs()).sum().backward()


def backward_passes_without_ddp() -> None:
    unseen: list[Body] = [lambda model: model.module(inputs()).sum().backward(), twice]
    for body in unseen:
        for finds in (False, True):
            found = said(body, finds)
            assert len(found) == (dist.get_rank() == 0), found
            assert all("a backward pass was not averaged: it did not come from model(...)" in each for each in found)
    seen: list[Body] = [accumulated, accumulated_by_forward, evaluated, lambda model: model(inputs()).sum().backward()]
    for body in seen:
        assert not said(body, False)


def averaged_all_the_same() -> None:
    """DDP averages a backward pass under ``no_sync()`` if a forward pass before it was not."""

    def backward_alone(model: DistributedDataParallel) -> None:
        outputs = model(inputs())
        with model.no_sync():
            outputs.sum().backward()
        model(inputs(1)).sum().backward()

    def another_between(model: DistributedDataParallel) -> None:
        outputs = model(inputs())
        with model.no_sync():
            model(inputs(1)).sum().backward()
        outputs.sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    for body, finds in product((backward_alone, another_between), (False, True)):
        found = said(body, finds)
        assert len(found) == (dist.get_rank() == 0), found
        assert all("a backward pass under no_sync() was averaged" in each for each in found)


def stepped_in_backward() -> None:
    """Plain DDP has an optimizer within the backward pass take gradients before they are averaged."""

    def by_hooks(clears: bool) -> Body:
        def body(model: DistributedDataParallel) -> None:
            def step(parameter: torch.Tensor) -> None:
                with torch.no_grad():
                    parameter.sub_(parameter.grad)
                if clears:
                    parameter.grad = None

            hooks = [each.register_post_accumulate_grad_hook(step) for each in model.parameters()]
            model(inputs()).sum().backward()
            for hook in hooks:
                hook.remove()

        return body

    for body, finds in product((by_hooks(False), by_hooks(True)), (False, True)):
        found = said(body, finds)
        assert len(found) == (dist.get_rank() == 0), found
        assert all("was changed in the backward pass before its average had come" in each for each in found)

    def watched(model: DistributedDataParallel) -> None:
        norms: list[torch.Tensor] = []
        hooks = [
            each.register_post_accumulate_grad_hook(lambda parameter: norms.append(parameter.grad.norm()))
            for each in model.parameters()
        ]
        accumulated(model)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        for hook in hooks:
            hook.remove()

    assert not said(watched, False) + said(watched, True)


def untaken(steps: str, **options: Any) -> list[str]:
    """What rank 0 logs if an optimizer takes a step after each average where there is an ``s``; an ``l`` loads then."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, **options)
    with listening() as lines, closing(gradwire.compress(model, "topk")):
        for number, step in enumerate(steps):
            model(inputs(number)).sum().backward()
            if step in "sl":
                optimizer.step()
                optimizer.zero_grad()
            if step == "l":
                model.load_state_dict(model.state_dict())
    return lines


def adversarial(quietly: bool) -> list[str]:
    """What rank 0 logs of a generator and its discriminator, in whose step both or only its own are averaged."""
    torch.manual_seed(3)
    nets = [nn.Linear(24, 40), nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))]
    generator, discriminator = (DistributedDataParallel(each) for each in nets)
    optimizers = [torch.optim.Adam(each.parameters(), 0.01) for each in nets]
    handles = [gradwire.compress(each, "topk") for each in (generator, discriminator)]
    with listening() as lines:
        for step in range(8):
            discriminator.zero_grad()
            made = generator(inputs(step))
            (discriminator(made.detach()) - discriminator(made.detach().flip(0))).square().sum().backward()
            optimizers[1].step()
            generator.zero_grad()
            with discriminator.no_sync() if quietly else nullcontext():
                discriminator(made).sum().backward()
            optimizers[0].step()
    for handle in handles:
        handle.close()
    assert all(same_everywhere(each) for net in nets for each in net.parameters())
    return lines


def averages_that_nobody_takes() -> None:
    for steps in ("-----", "s" * 30, "------ss-ssss--" + "s" * 30, "-s-s-s"):
        assert not untaken(steps), steps
    assert not untaken("ssl" + "s" * 9, fused=True)  # whose steps do not count as versions, as loading does
    assert not adversarial(quietly=True)
    for found in (untaken("-s" * 10), untaken("--s" * 5), adversarial(quietly=False)):
        assert len(found) == (dist.get_rank() == 0), found
        assert all("no optimizer took 4 of the last averages before the next ones" in each for each in found)


def closed() -> None:
    """The module inside trains on without DDP, in another dtype as well, and nobody follows it."""
    for finds in (False, True):
        model = DistributedDataParallel(network(), find_unused_parameters=finds)
        gradwire.compress(model, "topk").close()
        net = model.module
        with listening() as lines, closing(gradwire.Synchronizer(net, "topk")) as sync:
            for step in range(3):
                net.zero_grad()
                net(inputs(step)).sum().backward()
                sync.synchronize()
        net.to(torch.bfloat16)(inputs()).float().sum().backward()
        net.load_state_dict(network().state_dict(), assign=True)
        assert not lines


def wrapped_again() -> None:
    """A module that is wrapped anew and again, as where workers change, has nothing of what is gone."""
    net = network()
    for find_unused in (False, True, False):
        model = DistributedDataParallel(net, find_unused_parameters=find_unused)
        with closing(gradwire.compress(model, "topk", name="again")):
            model(inputs()).sum().backward()
        net.zero_grad()
        del model
        gc.collect()
    hooks = [each._post_accumulate_grad_hooks for each in net.parameters()]  # type: ignore[attr-defined]
    assert not any((*hooks, net._load_state_dict_post_hooks))


def state_assigned() -> None:
    """Plain DDP goes on with parameters that the model has no more."""

    def loaded(model: DistributedDataParallel) -> None:
        copy.deepcopy(model).module.load_state_dict(network().state_dict(), assign=True)
        model.load_state_dict(model.state_dict())

    def assigned(model: DistributedDataParallel) -> None:
        model.module.load_state_dict(network().state_dict(), assign=True)

    assert not said(loaded, False)
    found = said(assigned, False)
    assert len(found) == 3 * (dist.get_rank() == 0)
    assert all("put another parameter in the place of '0.weight', which DDP does not average" in each for each in found)


def parameters_replaced() -> None:
    """Given with names, nobody can know what took their places; but none has a gradient then."""

    def replaced(model: DistributedDataParallel) -> None:
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with closing(gradwire.Synchronizer(net.named_parameters(), "topk", name="in an own loop")) as sync:
            for step in range(4):
                if step == 2:
                    net.load_state_dict({name: each.clone() for name, each in net.state_dict().items()}, assign=True)
                optimizer.zero_grad()
                net(inputs()).sum().backward()
                sync.synchronize()

    found = said(replaced, False)
    assert len(found) == 3 * (dist.get_rank() == 0)
    assert all("no parameter that was given has a gradient" in each for each in found)


def averages_not_cleared() -> None:
    """By two optimizers that take turns and clear what is theirs; all is cleared, or nothing remembered, elsewhere."""
    for method, whole, told in (("topk", False, 1), ("topk", True, 0), ("qsgd", False, 0)):
        net = network()
        optimizers = [torch.optim.SGD(net[layer].parameters(), 0.1) for layer in (0, 2)]
        with listening() as lines, closing(gradwire.Synchronizer(net, method)) as sync:
            for step in range(4):
                for each in optimizers if whole else optimizers[step % 2 :][:1]:
                    each.zero_grad(set_to_none=step > 1)
                own = list(net[2 * (step % 2)].parameters())
                net(inputs()).sum().backward(inputs=own)
                sync.synchronize()
        again = [each for each in lines if "is what the step before averaged, and nothing came to it since" in each]
        assert len(again) == told * (dist.get_rank() == 0), (method, whole, lines)


def refused() -> None:
    model = DistributedDataParallel(network())
    with pytest.raises(ConfigurationError, match="the module is a DistributedDataParallel, which averages by itself"):
        gradwire.Synchronizer(model, "topk")
    with pytest.raises(ConfigurationError, match="the wrapped model is a DistributedDataParallel itself"):
        gradwire.compress(DistributedDataParallel(model), "topk")
    net = network()
    delayed: dict[str, Any] = {
        "delay_all_reduce_named_params": [("0.weight", net[0].weight)],
        "param_to_hook_all_reduce": net[0].bias,
    }
    with pytest.raises(ConfigurationError, match="delay_all_reduce_named_params has DDP average these by itself"):
        gradwire.compress(DistributedDataParallel(net, **delayed), "topk")
    with pytest.raises(ConfigurationError, match="skip_all_reduce_unused_params has DDP call no hook for some buckets"):
        gradwire.compress(DistributedDataParallel(net, skip_all_reduce_unused_params=True), "topk")


@pytest.mark.parametrize(
    "law",
    [
        converted_later,
        added_later,
        renamed,
        backward_passes_without_ddp,
        averaged_all_the_same,
        stepped_in_backward,
        averages_that_nobody_takes,
        closed,
        wrapped_again,
        state_assigned,
        parameters_replaced,
        averages_not_cleared,
        refused,
    ],
    ids=lambda law: law.__name__,
)
def test_what_ddp_overlooks(pool: Pool, law: Callable[[], None]) -> None:
    pool.run(2, law)
