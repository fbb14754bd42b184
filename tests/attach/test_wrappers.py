"""What other libraries wrap around models, optimizers and groups is taken for what is inside, or refused in words."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import AveragedModel

import gradwire
from gradwire import ConfigurationError
from pool import Pool, ranks


class FabricModule(nn.Module):
    """As lightning.fabric.wrappers._FabricModule: DDP is `_forward_module`, the user's model `_original_module`."""

    def __init__(self, forward_module: nn.Module, original_module: nn.Module) -> None:
        super().__init__()
        self._forward_module = forward_module
        self._original_module = original_module

    def forward(self, inputs: Tensor) -> Any:
        return self._forward_module(inputs)


class AcceleratedOptimizer(Optimizer):
    """As accelerate.optimizer's: an Optimizer by name that never was made one, and has another step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


class FabricOptimizer:
    """As lightning.fabric.wrappers._FabricOptimizer: takes over what the optimizer has, and its class."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.__dict__ = {key: value for key, value in optimizer.__dict__.items() if key not in ("state_dict", "step")}
        self.__class__ = type("FabricSGD", (self.__class__, optimizer.__class__), {})
        self._optimizer = optimizer

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    def step(self) -> None:
        self._optimizer.step()


class Plain:
    """No Optimizer at all, but around one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


class Lookahead(SGD):
    """An optimizer of its own that has another inside: its steps are what counts."""

    def __init__(self, optimizer: SGD) -> None:
        super().__init__(optimizer.param_groups, lr=0.1)
        self.optimizer = optimizer


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(40, 40)


def refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def backward(model: nn.Module) -> list[Tensor]:
    noise = torch.Generator().manual_seed(dist.get_rank())
    model.zero_grad()
    model(torch.randn(4, 40, generator=noise)).square().sum().backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@ranks(1)
def test_an_engine_of_deepspeed_is_named() -> None:
    engine = type("DeepSpeedEngine", (nn.Linear,), {"__module__": "deepspeed.runtime.engine"})(40, 40)
    refused(
        lambda: gradwire.compress(engine, "topk"),
        r"DeepSpeedEngine, and DeepSpeed averages by itself.*no_sync\(\), and engine.step",
    )


@ranks(1)
def test_models_in_wrappers() -> None:
    def compiled(module: nn.Module) -> Any:
        return torch.compile(module, backend="eager")

    net = network()
    for wrap in (compiled, lambda ddp: FabricModule(ddp, net), lambda ddp: compiled(FabricModule(ddp, net))):
        net.zero_grad()
        ddp = DistributedDataParallel(net)
        wrapped = wrap(ddp)
        handle = gradwire.compress(wrapped, "efsignsgd")
        refused(lambda wrapped=wrapped: gradwire.compress(wrapped, "topk"), "has the communication hook")
        backward(wrapped)
        assert handle.stats().steps == 1
        handle.close()
    net.zero_grad()
    ddp = DistributedDataParallel(net)
    refused(lambda: gradwire.compress(compiled(net), "topk"), "wrap it in torch.nn.parallel.Distributed")
    handle = gradwire.compress(ddp, "variance", moments="samples")
    gradwire.SecondMoments(compiled(ddp), handle, per="samples").close()
    handle.close()


@ranks(2)
def test_names_are_the_same_whatever_of_a_model_is_compiled() -> None:
    """So patterns match, and a run goes on from states, with the same bits."""

    def whole(net: nn.Sequential) -> Any:
        return torch.compile(net, backend="eager")

    def layer(net: nn.Sequential) -> Any:
        net[0] = whole(net[0])  # type: ignore[arg-type]
        return net

    found, state = [], {}
    for wrap in (lambda net: net, whole, layer):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40))
        names = [name for name, _ in net.named_parameters()]
        model = DistributedDataParallel(wrap(net))
        handle = gradwire.compress(model, {"0.weight": "qsgd:bits=4,memory=residual", "*": "topk"})
        if not state:
            backward(model)
            state = handle.state_dict()
        handle.load_state_dict(state)
        found.append(backward(model))
        assert gradwire.Owed(handle, model).state_dict().keys() >= set(names)
        handle.close()
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


@ranks(1)
def test_a_reducer_that_knows_no_hooks() -> None:
    usual, torch._dynamo.config.optimize_ddp = torch._dynamo.config.optimize_ddp, "python_reducer"  # type: ignore[assignment]
    try:
        model = DistributedDataParallel(network())
    finally:
        torch._dynamo.config.optimize_ddp = usual
    refused(lambda: gradwire.compress(model, "topk"), "optimize_ddp='python_reducer'.* 'ddp_optimizer'")


@ranks(2)
def test_optimizers_in_wrappers() -> None:
    for wrap in (
        AcceleratedOptimizer,
        FabricOptimizer,
        Plain,
        lambda inner: Plain(AcceleratedOptimizer(inner)),
        Lookahead,
    ):
        net = network()
        optimizer = wrap(SGD(net.parameters(), lr=0.1))  # type: ignore[operator]
        handle = gradwire.periodic(optimizer, every=2)
        for _ in range(4):
            backward(net)
            optimizer.step()
        assert handle.syncs == 2
        handle.close()
    refused(lambda: gradwire.periodic(net), "optimizer is a Linear; give a torch.optim.Optimizer")  # type: ignore[arg-type]


@ranks(4)
def test_meshes_and_other_things_for_groups() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = network()
    parameters = list(net.named_parameters())
    optimizer = SGD(net.parameters(), lr=0.1)
    for make in (
        lambda group: gradwire.Synchronizer(parameters, "efsignsgd", process_group=group),
        lambda group: gradwire.optim.OneBitAdam(parameters, freeze_step=2, process_group=group),
        lambda group: gradwire.periodic(optimizer, process_group=group),
    ):
        handle = make(mesh["dp"])
        assert getattr(handle, "_compressed", handle).engine.world_size == 2
        handle.close()
        refused(lambda make=make: make(mesh), r"device mesh of 2 dimensions; give one, such as mesh\['dp'\]")
        refused(lambda make=make: make([0, 1]), r"process_group is \[0, 1\]; give a torch.distributed.ProcessGroup")
    first = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        refused(lambda: gradwire.Synchronizer(parameters, "dense", process_group=first), "not in the process group")


@ranks(1)
def test_distributed_tensors() -> None:
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor  # seconds

    mesh = init_device_mesh("cpu", (1,))
    net = distribute_module(
        network(),
        mesh,
        lambda _, module, mesh: module.register_parameter(
            "weight", nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))
        ),
    )
    wanted = r"parameter '.*weight' is a DTensor, .*nn\.Parameter\(parameter\.to_local\(\)\)"
    refused(lambda: gradwire.optim.OneBitAdam(net.named_parameters(), freeze_step=2), wanted)
    sync = gradwire.Synchronizer(network().named_parameters(), "dense")
    assert torch.equal(sync.average({"weight": net.weight.detach()})["weight"], net.weight.to_local())
    sync.close()


def copies(folder: str) -> None:
    """A copy averages as DDP does, takes nothing of the handle, and a method can be attached to it anew."""
    model = DistributedDataParallel(network())
    reference = backward(DistributedDataParallel(copy.deepcopy(model.module)))
    handle = gradwire.compress(model, "efsignsgd")
    compressed = backward(model)
    path = f"{folder}/{dist.get_rank()}.pt"
    torch.save(model, path)
    for other in (copy.deepcopy(model), AveragedModel(model).module, torch.load(path, weights_only=False)):
        assert all(map(torch.equal, backward(other), reference))
        again = copy.deepcopy(copy.deepcopy(other))
        own = gradwire.compress(again, "efsignsgd")
        assert all(map(torch.equal, backward(again), compressed))
        refused(lambda again=again: gradwire.compress(again, "topk"), "has the communication hook '_on_bucket' already")
        own.close()
    assert handle.stats().steps == 1
    handle.close()


def test_copies_of_a_model(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, copies, str(tmp_path))
