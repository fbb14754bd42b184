"""What cannot be done says so: the value, what is allowed, the remedy. And the model stays usable."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import gradwire
from gradwire import ConfigurationError, methods
from gradwire.attach.given import check_parameters
from gradwire.memory import EF21, Diana, Momentum, Residual
from gradwire.optim import OneBitAdam
from pool import Pool, ranks

VALUES = torch.randn(100)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("topkk", {}, "'topkk' is not known; did you mean 'topk'"),
        ("topk", {"ratio": 0.0}, r"ratio=0.0 is out of range; choose 0 < ratio <= 1"),
        ("topk", {"ratio": 1.5}, r"ratio=1.5 is out of range"),
        (
            "topk",
            {"rtaio": 0.5},
            r"'topk' has no option 'rtaio'; did you mean 'ratio'\? its options: ratio, values, indices",
        ),
        ("topk", {"ratio": "much"}, "ratio='much' is not possible; choose a number"),
        (
            "topk",
            {"values": "fp8"},
            r"value coding 'fp8' is not known; did you mean 'fp32' .*all of them: 'fp32', 'fp16', .*'qsgd:N'",
        ),
        ("topk", {"indices": "gaps"}, "index coding 'gaps' is not known; .*all of them: 'elias-fano', "),
        ("qsgd", {"bits": 3}, r"bits=3 is not possible; choose 2, 4 or 8"),
        ("qsgd", {"bucket": 100}, r"'qsgd' has no option 'bucket'; did you mean granularity='block:100'\?"),
        ("qgz", {"bucket": 0}, r"'qgz' has no option 'bucket'; did you mean granularity='layer'\?"),
        ("qsgd", {"norm": "l1"}, "norm='l1' is not known; choose 'max' or 'l2'"),
        ("powersgd", {"rank": 0}, "rank=0 is out of range; choose a whole number >= 1"),
        ("acpsgd", {"rank": 2.5}, "rank=2.5 is out of range"),
        ("thc", {"overflow": 1e-17}, "overflow=1e-17 is out of range; choose 1e-15 to below 1"),
        (
            "acpsgd",
            {"granularity": "model"},
            "acpsgd cannot work at granularity='model' because it factorises one matrix at a time; its own: layer",
        ),
        ("PowerSGD", {}, "method 'PowerSGD' is not known; did you mean 'powersgd'"),
        ("topk", {"granularity": f"block:{1 << 70}"}, "is out of range; choose 'block:N' with N >= 1"),
        ("topk", {"granularity": "block:0"}, "granularity='block:0' is out of range; choose 'block:N' with N >= 1"),
        ("topk", {"route": "allreduce"}, "topk cannot take route='allreduce'; its routes: gather, sharded"),
        (
            "topk",
            {"memory": "much"},
            "memory 'much' is not known; all of them: 'none', 'residual', .* or an object such as",
        ),
        (
            "qsgd",
            {"bits": 2, "memory": "residual"},
            "qsgd cannot carry memory=residual: .* grow without end; .*'diana'",
        ),
        (
            "qsgd",
            {"bits": 4, "norm": "l2", "memory": "ef21"},
            "cannot carry memory=ef21: what it leaves",
        ),
        ("terngrad", {"memory": Momentum(memory=Residual())}, r"memory=momentum\(.*residual\): .* grow without end"),
        ("topk", {"values": "qsgd:2"}, "topk, with values that are written so coarsely, cannot carry memory=residual"),
        ("topk", {"owner": "qsgd:2"}, "owner='qsgd:2' cannot go with memory=residual: .* such as 'qsgd:8'"),
        ("atomo", {"memory": "residual"}, "its memories: none, momentum, diana"),
        ("threshold", {"memory": Momentum(memory=EF21())}, "threshold cannot carry memory=ef21; its memories: none"),
        ("topk", {"memory": "diana"}, "memory=diana is for unbiased methods; topk is contractive; choose 'ef21'"),
        ("qsgd", {"memory": Diana(alpha=0.9)}, "alpha=0.9 is too large for a method with an error bound of"),
        (object(), {}, "is neither a name nor a method"),
        ("topk", {"seed": 1.5}, "seed=1.5 is out of range; choose a whole number"),
        ("powersgd", {"rank": True}, "rank=True is not possible; choose a whole number"),
        ("dgc", {"warmup": float("nan")}, "warmup=nan is not possible; choose a whole number"),
        ("oktopk", {"recut": 1.5}, "recut=1.5 is not possible; choose a whole number"),
        ("adacomp", {"bin": 2.5}, "bin=2.5 is not possible; choose a whole number"),
        ("3lc", {"sparsity": True}, "sparsity=True is not possible; choose a number"),
        ("demo", {"sign": "no"}, "sign='no' is not possible; choose True or False"),
        ("topk", {"ratio": torch.ones(2)}, r"ratio=tensor\(.* is not possible; choose a number"),
        (methods.AdaComp(bin=float("inf")), {}, "bin=inf is not possible; choose a whole number"),
    ],
)
def test_unknown_and_out_of_range(method: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        gradwire.roundtrip(VALUES, method, **options)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(3, dtype=torch.complex64), "complex64; give float32, float16, bfloat16 or float64"),
        (torch.ones(3, dtype=torch.int64), "int64; give float32"),
        (torch.ones(3).to_sparse(), "sparse_coo; give a dense one"),
        ([1.0, 2.0], "list; give float32"),
    ],
)
def test_tensors_that_cannot_be_compressed(tensor: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        gradwire.roundtrip(tensor, "topk")


@pytest.mark.parametrize(
    ("method", "option", "number", "plain"),
    [
        ("qsgd", "bits", 4.0, 4),
        ("adacomp", "bin", np.int64(7), 7),
        ("powersgd", "rank", np.int64(2), 2),
        ("topk", "ratio", np.float32(0.25), 0.25),
        ("topk", "ratio", torch.tensor(0.25), 0.25),
        ("topk", "seed", np.int64(7), 7),
    ],
)
def test_numbers_of_other_kinds_are_taken(method: str, option: str, number: Any, plain: float) -> None:
    matrix = torch.randn(20, 30)
    given: list[dict[str, Any]] = [{option: number}, {option: plain}]
    assert torch.equal(*(gradwire.roundtrip(matrix, method, **each).decoded for each in given))
    if option in ("bits", "rank", "bin"):
        assert type(getattr(methods.make(method, {option: number}), option)) is int


def test_no_process_group() -> None:
    with pytest.raises(ConfigurationError, match=r"call torch\.distributed\.init_process_group"):
        gradwire.Synchronizer(nn.Linear(3, 3).named_parameters(), "topk")


def refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


class CountedName(str):
    """A name that counts how often any is compared with another."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedName.compared += 1
        return str.__eq__(self, other)


def test_parameters_are_checked_in_linear_time() -> None:
    count = 2000
    check_parameters([(CountedName(number), nn.Parameter(torch.zeros(2))) for number in range(count)])
    assert CountedName.compared < 10 * count


@ranks(1)
def test_models_that_are_refused() -> None:
    net = nn.Linear(40, 40)
    refused(lambda: gradwire.compress(net, "topk"), "Linear; wrap it in torch.nn.parallel.DistributedData")  # type: ignore[arg-type]

    model = DistributedDataParallel(net)
    refused(lambda: gradwire.compress(model, "topk", ratio=2), "ratio=2 is out of range")
    gradwire.compress(model, "topk", ratio=0.1)
    refused(lambda: gradwire.compress(model, "dense"), "has the communication hook '_on_bucket' already")
    model(torch.ones(2, 40)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())

    model = DistributedDataParallel(net)
    refused(lambda: gradwire.compress(model, "dense"), r"has gradients of an earlier backward pass; call zero_grad\(\)")
    net.zero_grad()
    for _ in range(2):
        model(torch.ones(2, 40)).sum().backward()
    net.zero_grad()
    refused(lambda: gradwire.compress(model, "dense"), "has run a backward pass already")

    sparse = DistributedDataParallel(nn.Embedding(9, 4, sparse=True))
    refused(lambda: gradwire.compress(sparse, "dense"), "sparse=True")

    net = nn.Linear(4, 4)
    sync = gradwire.Synchronizer(net.named_parameters(), "dense")
    net.weight.grad = torch.ones(4, 4).to_sparse()
    refused(sync.synchronize, "gradient of 'weight' has layout torch.sparse_coo")
    net.weight.grad = torch.ones(4, 4)
    sync.synchronize()

    for given in (net.parameters(), list(net.parameters()), dict(net.named_parameters()), net.weight, None):
        refused(lambda given=given: gradwire.Synchronizer(given, "dense"), "among the parameters given is a")
    lazy = nn.LazyLinear(3)
    refused(lambda: gradwire.Synchronizer(lazy, "dense"), "'weight' has no shape yet; have the model take a first")

    for choice, message in (
        ({"fuse_bytes": "1 MB"}, "fuse_bytes='1 MB' is out of range; choose a whole number of bytes, from 1"),
        ({"dense": 1024}, r"dense=1024 is no policy; give gradwire.DensePolicy\(below=1024"),
        ({"learning_rate": lambda: None}, r"learning_rate\(\) failed or gave no number"),
    ):
        refused(lambda choice=choice: gradwire.Synchronizer(net, "topk", **choice), message)

    frozen = nn.Linear(4, 4).requires_grad_(False)
    refused(lambda: gradwire.Synchronizer(frozen.named_parameters(), "dense"), "no parameters that require gradients")
    meta = nn.Linear(4, 4, device="meta")
    refused(lambda: gradwire.Synchronizer(meta.named_parameters(), "dense"), "on the meta device; materialise")


def mixed_precision() -> None:
    mixed = DistributedDataParallel(nn.Linear(4, 4), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    refused(lambda: gradwire.compress(mixed, "dense"), "mixed_precision occupies the communication hook")


def test_mixed_precision_of_ddp(pool: Pool) -> None:
    try:
        torch.Stream()
    except RuntimeError:
        pytest.skip("DDP's mixed_precision makes a stream, which this build of torch cannot without a GPU")
    pool.run(1, mixed_precision)


@ranks(2)
def test_two_synchronizers_of_the_same_workers() -> None:
    """The second is refused what the first has averaged; by turns, or over other workers, both are right."""
    net = nn.Linear(40, 40)
    first, second = gradwire.Synchronizer(net, "dense"), gradwire.Synchronizer(net, "topk")
    alone = gradwire.Synchronizer(net, "dense", process_group=dist.new_subgroups(1)[0])
    for sync, other in ((first, second), (second, first)):
        net.zero_grad()
        net(torch.ones(2, 40)).sum().backward()
        alone.synchronize()
        sync.synchronize()
        refused(other.synchronize, "gradient of 'weight' has been averaged by another Synchronizer.*call one of them")
        sync.synchronize()
        net(torch.ones(2, 40)).sum().backward()
        other.synchronize()
    assert [sync.stats().steps for sync in (first, second, alone)] == [3, 3, 2]


@ranks(2)
def test_a_synchronizer_beside_a_hook_of_the_same_workers() -> None:
    """Refused, whichever was attached first, until the hook's handle is closed; over other workers it is right."""
    net = nn.Linear(40, 40)
    before = gradwire.Synchronizer(net, "dense")
    handle = gradwire.compress(DistributedDataParallel(net), "topk")
    after = gradwire.Synchronizer(net.named_parameters(), "qsgd")
    part = gradwire.Synchronizer([("last", net.bias)], "dense")
    alone = gradwire.Synchronizer(net, "dense", process_group=dist.new_subgroups(1)[0])
    given = torch.full((40, 40), float(dist.get_rank()))
    net.weight.grad = given.clone()
    for sync, name in ((before, "weight"), (after, "weight"), (part, "last")):
        refused(sync.synchronize, f"gradient of '{name}' is averaged by gradwire.compress in the backward pass")
    alone.synchronize()
    assert torch.equal(net.weight.grad, given)
    handle.close()
    before.synchronize()
    assert torch.equal(net.weight.grad, torch.full((40, 40), 0.5))
    assert [sync.stats().steps for sync in (before, after, part, alone)] == [1, 0, 0, 1]


@ranks(2)
def test_a_hook_counts_for_as_long_as_its_model_lives() -> None:
    """Nobody need keep the handle."""
    net = nn.Linear(40, 40)
    ddp = DistributedDataParallel(net)
    gradwire.compress(ddp, "topk")
    gc.collect()
    sync = gradwire.Synchronizer(net, "dense")
    refused(sync.synchronize, "gradient of 'weight' is averaged by gradwire.compress in the backward pass")
    ddp(torch.ones(2, 40)).sum().backward()


@ranks(2)
def test_an_optimizer_that_averages_beside_what_averages_gradients() -> None:
    """Of a plain model it takes a step, once nothing else averages its gradients, and each worker's own."""
    net = nn.Linear(40, 40)
    handle = gradwire.compress(DistributedDataParallel(net), "topk")
    optimizer = OneBitAdam(net.named_parameters(), freeze_step=5)
    sync = gradwire.Synchronizer(net, "dense")
    net(torch.ones(2, 40)).sum().backward()
    refused(optimizer.step, "gradient of 'weight' is averaged by gradwire.compress in the backward pass")
    handle.close()
    sync.synchronize()
    refused(optimizer.step, "gradient of 'weight' has been averaged by another Synchronizer")
    assert optimizer.steps == 0
    net(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    assert optimizer.steps == 1


@ranks(2)
def test_what_is_no_tensor_has_no_average() -> None:
    net = nn.Linear(4, 4)
    sync = gradwire.Synchronizer(net, "dense")
    refused(lambda: sync.average({"weight": [1.0]}), "given for 'weight' is a list; give a tensor")  # type: ignore[dict-item]
    assert sync.stats().steps == 0


class OnGPU(nn.Parameter):
    """A parameter that says so, also where there is no GPU."""

    device = torch.device("cuda", 1)


@ranks(1)
def test_parameters_on_several_devices() -> None:
    """Every way in says which parameter is where."""
    net = nn.Linear(40, 40)
    net.bias = OnGPU(torch.zeros(40))
    message = "parameter 'bias' is on cuda:1, 'weight' on cpu; use one device a process"
    refused(lambda: gradwire.Synchronizer(net, "topk"), message)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    refused(lambda: gradwire.periodic(optimizer, parameters=net.named_parameters()), message)
    refused(lambda: gradwire.optim.OneBitAdam(net.named_parameters(), freeze_step=2), message)
    model = DistributedDataParallel(nn.Linear(40, 40))
    model.module.bias = net.bias
    refused(lambda: gradwire.compress(model, "topk"), message)


@ranks(1)
def test_parameters_of_dtypes_that_cannot_be_averaged() -> None:
    """float64 has more digits than averages, which are those of float32: gradients may have it, parameters may not."""
    net = nn.Linear(40, 40).double()
    message = (
        "parameter 'weight' has dtype torch.float64; gradwire averages torch.float32, torch.float16, torch.bfloat16 "
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    refused(lambda: gradwire.periodic(optimizer, parameters=net.named_parameters()), message)
    refused(lambda: gradwire.optim.OneBitAdam(net.named_parameters(), freeze_step=2), message)
    gradwire.Synchronizer(net, "topk").close()
    message = "parameter 'weight' has dtype torch.complex64; gradwire averages torch.float32, "
    refused(lambda: gradwire.Synchronizer(nn.Linear(4, 4, dtype=torch.complex64), "topk"), message)


@ranks(3)
def test_ranks_that_differ_all_say_so() -> None:
    rank = dist.get_rank()
    net = nn.Linear(30, 30)
    ratio = 0.1 if rank < 2 else 0.2
    refused(
        lambda: gradwire.Synchronizer(net.named_parameters(), "topk", ratio=ratio),
        "ranks differ: rank 0 has 'ratio=0.1', rank 2 has 'ratio=0.2'",
    )
    method = "topk" if rank == 0 else "dense"
    refused(lambda: gradwire.compress(DistributedDataParallel(net), method), "rank 0 has 'method=topk', rank 1 has")
    other = nn.Linear(30, 30 if rank == 0 else 31)
    refused(
        lambda: gradwire.Synchronizer(other.named_parameters(), "dense"),
        r"rank 0 has 'parameter weight with shape \(30, 30\)",
    )
    more = nn.Sequential(*[nn.Linear(30, 30, bias=False) for _ in range(1 + rank)])
    refused(lambda: gradwire.Synchronizer(more.named_parameters(), "dense"), "rank 0 has 'nothing', rank 1 has")
    sync = gradwire.Synchronizer(net.named_parameters(), "dense")
    net.weight.grad = torch.full((30, 30), float(rank))
    sync.synchronize()
    assert (net.weight.grad == 1).all()


@ranks(1)
def test_states_that_do_not_fit() -> None:
    net = nn.Linear(40, 40)
    sync = gradwire.Synchronizer(net.named_parameters(), "efsignsgd", route="gather")
    net.weight.grad = torch.randn(40, 40, generator=torch.Generator().manual_seed(0))
    sync.synchronize()
    state = sync.state_dict()
    residual = state["tensors"]["residual"]["weight"]
    assert residual.any()

    def unfit(message: str, **changes: Any) -> None:
        refused(lambda: sync.load_state_dict({**state, **changes}), message)

    unfit("version 7 is not known", version=7)
    choices, parameters = state["configuration"], state["parameters"]
    unfit("saved with method='topk', this handle has method='efsignsgd'", configuration={**choices, "method": "topk"})
    unfit("saved with more='1', this handle has more=None", configuration={**choices, "more": "1"})
    unfit("residual of 'alien', which this model does not have", tensors={"residual": {"alien": torch.zeros(3)}})
    unfit(r"residual of 'weight' has shape \(3,\)", tensors={"residual": {"weight": torch.zeros(3)}})
    unfit("dtype torch.float64", tensors={"residual": {"weight": residual.double()}})
    unfit("lacks residual of 'weight'", tensors={})
    unfit("residual of 'weight' is the float 1.5, not a tensor", tensors={"residual": {"weight": 1.5}})
    unfit("residual is a list, not tensors", tensors={"residual": [residual]})
    unfit("kind 'mine'", kinds={"residual": "mine"})
    unfit("'step' is the str '3', but state_dict\\(\\) gives int there", step="3")
    unfit("step -1", step=-1)
    unfit("'tensors' is the int 3", tensors=3)
    unfit("'weight' with shape \\(9, 9\\)", parameters={**parameters, "weight": {"shape": [9, 9], "dtype": "x"}})
    unfit("describes parameter 'weight' by the int 3", parameters={**parameters, "weight": 3})
    half = {**parameters, "weight": {"shape": [40, 40], "dtype": "torch.bfloat16"}}
    unfit("dtype torch.bfloat16, this handle has it with shape .* and dtype torch.float32", parameters=half)
    unfit("buckets do not hold each of its parameters once", buckets=[["weight"]])
    unfit("saved by rank 0 of 3 workers, this is rank 0 of 1; gradwire.redistribute", world_size=3)
    for key in state:
        if key != "version":
            part = {name: value for name, value in state.items() if name != key}
            refused(lambda part=part: sync.load_state_dict(part), f"has no '{key}'")
    refused(lambda: sync.load_state_dict([1]), "the state is a list")  # type: ignore[arg-type]
    unchanged = sync.state_dict()
    assert unchanged["step"] == 1
    assert torch.equal(unchanged["tensors"]["residual"]["weight"], residual)
    sync.load_state_dict(state)
