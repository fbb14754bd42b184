"""Squares of samples and micro-batches, against those of torch.func."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import ConfigurationError
from pool import Pool, ranks

EVERYTHING = gradwire.DensePolicy(below=0, vectors=False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1, stride=2)
        self.second = nn.Conv2d(6, 4, 3, groups=2, dilation=2, padding=(2, 1))
        self.tokens = nn.Linear(4, 5)
        self.last = nn.Linear(8 * 5 * 2, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.second(self.first(images).tanh()).tanh()
        return self.last(self.tokens(features.flatten(2).mT[:, :16]).tanh().flatten(1))


def net_and_batch(rank: int = 0) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    net = Net()
    torch.manual_seed(1 + rank)
    return net, torch.randn(6, 2, 8, 16), torch.randint(3, (6,))


def loss_of(net: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(net(images), labels, reduction="sum") / 6


def expected_squares(net: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    squares = {name: torch.zeros_like(parameter) for name, parameter in net.named_parameters()}
    for image, label in zip(images, labels, strict=True):
        gradients = torch.autograd.grad(loss_of(net, image[None], label[None]), list(net.parameters()))
        for target, gradient in zip(squares.values(), gradients, strict=True):
            target += gradient**2
    return squares


@ranks(1)
def test_squares_of_samples_are_those_of_single_backward_passes() -> None:
    net, images, labels = net_and_batch()
    expected = expected_squares(net, images, labels)
    handle = gradwire.Synchronizer(net.named_parameters(), "variance", moments="samples", dense=EVERYTHING)
    moments = gradwire.SecondMoments(net, handle, per="samples")
    with torch.no_grad():
        net(images)
    for halves in (slice(None),), (slice(0, 2), slice(2, 6)):
        net.zero_grad()
        for part in halves:
            loss_of(net, images[part], labels[part]).backward()
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(handle.engine.store.get("squares", name), expected[name], rtol=1e-4, atol=1e-9)
            assert parameter.grad is not None
        before = handle.state_dict()["tensors"].get("second_moments", {})
        handle.synchronize()
        kept = handle.state_dict()["tensors"]
        for name, squares in expected.items():
            assert kept["squares"][name].count_nonzero() == 0
            if not before:
                factor = kept["second_moments"][name] / squares
                assert (factor.isclose(torch.tensor(0.999)) | (factor.isclose(torch.tensor(1.0))) | (factor == 0)).all()
    moments.close()
    net.zero_grad()
    loss_of(net, images, labels).backward()
    assert handle.state_dict()["tensors"]["squares"]["last.weight"].count_nonzero() == 0
    handle.close()


def squares_in_ddp(per: str) -> list[bytes]:
    net, images, labels = net_and_batch(dist.get_rank())
    model = DistributedDataParallel(net)
    handle = gradwire.compress(model, "variance", moments=per, dense=EVERYTHING, capacity=1.0, alpha=0.2)
    gradwire.SecondMoments(model, handle, per=per)
    found = []
    for _ in range(4):
        model.zero_grad()
        with model.no_sync():
            loss_of(model, images[:3], labels[:3]).backward()
        first = [parameter.grad.clone() for parameter in net.parameters()]
        loss_of(model, images[3:], labels[3:]).backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in net.parameters()]).numpy().tobytes())
        assert len(first) == len(list(net.parameters()))
        assert all(not each.any() for each in handle.state_dict()["tensors"]["squares"].values())
    assert any(parameter.grad.any() for parameter in net.parameters())
    handle.close()
    return found


@pytest.mark.parametrize("per", ["samples", "microbatches"])
def test_in_ddp_squares_are_there_when_buckets_are(pool: Pool, per: str) -> None:
    first, second = pool.run(2, squares_in_ddp, per)
    assert first == second


@ranks(1)
def test_squares_of_microbatches_are_those_of_backward_passes() -> None:
    net, images, labels = net_and_batch()
    handle = gradwire.Synchronizer(net.named_parameters(), "hybrid", moments="microbatches", dense=EVERYTHING)
    gradwire.SecondMoments(net, handle, per="microbatches")
    expected = [torch.zeros_like(each) for each in net.parameters()]
    for part in (slice(0, 2), slice(2, 6)):
        for total, gradient in zip(
            expected, torch.autograd.grad(loss_of(net, images[part], labels[part]), list(net.parameters())), strict=True
        ):
            total += gradient**2
    for each in handle.engine.store.state()["squares"]:
        handle.engine.store.get("squares", each).zero_()
    for part in (slice(0, 2), slice(2, 6)):
        loss_of(net, images[part], labels[part]).backward()
    for (name, _), squares in zip(net.named_parameters(), expected, strict=True):
        torch.testing.assert_close(handle.engine.store.get("squares", name), squares)
    handle.close()


@ranks(1)
def test_what_has_no_squares_is_refused() -> None:
    net = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(6, 2))
    handle = gradwire.Synchronizer(net.named_parameters(), "variance", moments="samples", dense=EVERYTHING)
    with pytest.raises(ConfigurationError, match=r"'0\.weight'|'0\.bias'"):
        gradwire.SecondMoments(net, handle, per="samples")
    with pytest.raises(ConfigurationError, match="per='microbatches'"):
        gradwire.SecondMoments(net, handle, per="microbatches")
    handle.close()


@pytest.mark.parametrize("per", ["samples", "microbatches"])
@ranks(2)
def test_squares_of_parts_are_refused(per: str) -> None:
    """Where a rank averages rows of a node's gradient, or what FSDP2 reduced, nobody would tell the squares."""
    net, sharded = nn.Linear(40, 50), nn.Linear(40, 50)
    handle = gradwire.Synchronizer(net, "variance", moments=per, inside=2)
    with pytest.raises(ConfigurationError, match=r"'weight': with inside= .*choose moments='step', or leave inside="):
        gradwire.SecondMoments(net, handle, per=per)
    handle.close()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    handle = gradwire.compress(sharded, "variance", moments=per)
    with pytest.raises(ConfigurationError, match=r"'weight': it is a DTensor, .*choose moments='step', or leave FSDP"):
        gradwire.SecondMoments(sharded, handle, per=per)
    assert not handle.engine.observed
    handle.close()


def test_moments_are_checked() -> None:
    for name in ("variance", "hybrid"):
        with pytest.raises(ConfigurationError, match="moments"):
            gradwire.methods.get(name)(moments="sample")


@ranks(2)
def test_squares_that_nobody_tells_are_asked_for() -> None:
    with mock.patch.object(logging.getLogger("gradwire"), "warning") as warn:
        for observed in (True, False):
            net, images, labels = net_and_batch(dist.get_rank())
            handle = gradwire.Synchronizer(net, "variance", preset="paper", name=str(observed))
            if observed:
                gradwire.SecondMoments(net, handle, per="samples")
            for _ in range(2):
                loss_of(net, images, labels).backward()
                handle.synchronize()
            handle.close()
            assert warn.call_count == (not observed and dist.get_rank() == 0)
    if dist.get_rank() == 0:
        assert "call gradwire.SecondMoments(model, handle" in warn.call_args[0][0]
