"""DDP lays a gradient out as its parameter is; what is averaged and remembered of it does not depend on that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from catalogue import Case, cases
from gradwire import ConfigurationError, methods
from pool import Pool, ranks

SHAPES = {"matrix": (64, 96), "filter": (16, 8, 3, 3), "plain": (40, 50), "vector": (300,)}
EVERYTHING = gradwire.DensePolicy(below=0, vectors=False)


def contiguous(tensor: Tensor) -> Tensor:
    return tensor.contiguous()


def permuted(tensor: Tensor) -> Tensor:
    """The same values, laid out column by column or with channels last."""
    match tensor.dim():
        case 2 if len(tensor) == 64:
            return tensor.t().contiguous().t()
        case 4:
            return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def with_gaps(tensor: Tensor) -> Tensor:
    """The same values, every other one in memory."""
    return torch.stack((tensor, tensor), -1)[..., 0]


class Given(nn.Module):
    """Its gradients are what it is called with, whatever the layout of its parameters."""

    def __init__(self, lay: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(lay(torch.zeros(shape, dtype=dtype))))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return torch.stack([(each * gradients[name]).sum() for name, each in self.named_parameters()]).sum()


class Attached:
    """A model of one memory order, and the method attached to it."""

    def __init__(
        self, lay: Callable[[Tensor], Tensor], case: Case, dtype: torch.dtype = torch.float32, views: bool = False
    ) -> None:
        self.model = DistributedDataParallel(Given(lay, dtype), bucket_cap_mb=0.03, gradient_as_bucket_view=views)
        self.handle = gradwire.compress(self.model, case.method, dense=EVERYTHING, **case.arguments)
        self.dtype = dtype

    def averages(self, step: int) -> dict[str, Tensor]:
        self.model.zero_grad()
        noise = torch.Generator().manual_seed(100 * step + dist.get_rank())
        given = {name: torch.randn(shape, generator=noise).to(self.dtype) for name, shape in SHAPES.items()}
        self.model(given).backward()
        return {name: each.grad.clone() for name, each in self.model.module.named_parameters()}


def same_averages(
    chosen: list[Case], lay: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32, views: bool = False
) -> None:
    for case in chosen:
        expected, ours = Attached(contiguous, case, dtype), Attached(lay, case, dtype, views)
        for step in range(3):
            reference = expected.averages(step)
            for name, average in ours.averages(step).items():
                assert torch.equal(average, reference[name]), (str(case), name, step)
        reference_state, state = expected.handle.state_dict(), ours.handle.state_dict()
        for field, kept in reference_state["tensors"].items():
            for name, value in kept.items():
                assert torch.equal(state["tensors"][field][name], value), (str(case), field, name)
        # Each goes on from where the other was.
        expected.handle.load_state_dict(state)
        ours.handle.load_state_dict(reference_state)
        reference = expected.averages(3)
        for name, average in ours.averages(3).items():
            assert torch.equal(average, reference[name]), (str(case), name)
        expected.handle.close()
        ours.handle.close()


USUAL = [case for case in cases() if case.memory == methods.get(case.method).memory]
CHOSEN = [next(case for case in USUAL if case.method == name) for name in methods.names()]
CHOSEN += [Case("topk", {"ratio": 0.05}, scope, "sharded", "residual") for scope in ("block:96", "bucket", "model")]
FEW = [case for case in CHOSEN if case.method in ("powersgd", "topk")]


def test_every_method_takes_any_memory_order(pool: Pool) -> None:
    pool.run(2, same_averages, CHOSEN, permuted)


def test_half_precision_and_views_of_buckets(pool: Pool) -> None:
    pool.run(2, same_averages, FEW, permuted, torch.bfloat16)
    pool.run(2, same_averages, FEW, permuted, torch.float32, True)


def test_parameters_with_gaps_in_memory(pool: Pool) -> None:
    pool.run(2, same_averages, FEW, with_gaps)


@ranks(1)
def test_a_matrix_of_low_rank_is_found_in_columns_too() -> None:
    """As in a contiguous parameter: what is of the method's rank comes back as it was."""
    for lay in (contiguous, permuted):
        attached = Attached(lay, Case("powersgd", {"rank": 4}, "layer", "allreduce", "residual"))
        noise = torch.Generator().manual_seed(0)
        given = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        given["matrix"] = torch.randn(64, 2, generator=noise) @ torch.randn(2, 96, generator=noise)
        for _ in range(3):
            attached.model.zero_grad()
            attached.model(given).backward()
        error = (attached.model.module.matrix.grad - given["matrix"]).norm() / given["matrix"].norm()
        assert error < 1e-5, (lay, float(error))
        attached.handle.close()


@ranks(1)
def test_parameters_converted_after_wrapping() -> None:
    """DDP does not notice; that gradients are taken for others must not go unnoticed either."""
    case = Case("powersgd", {"rank": 2}, "layer", "allreduce", "residual")
    for before, after in ((contiguous, permuted), (permuted, contiguous)):
        for scope in ("layer", "model"):
            model = DistributedDataParallel(Given(before, torch.float32), find_unused_parameters=True)
            for each in model.module.parameters():
                each.data = after(each.data)
            options = case.arguments if scope == "layer" else {"granularity": "model", "ratio": 0.1}
            handle = gradwire.compress(model, "powersgd" if scope == "layer" else "topk", **options)
            given = {name: torch.randn(shape) for name, shape in SHAPES.items()}
            with pytest.raises(ConfigurationError, match=r"memory format of parameter '.*' was changed after DDP"):
                model(given).backward()
            handle.close()
