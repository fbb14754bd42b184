"""Models that FSDP2 has sharded: restarts, steps that are not finite, failures, and what is refused in a sentence."""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import ConfigurationError, GradwireError, WireError
from pool import FORKING, Pool, ranks
from sharded import Net, fsdp_has, hsdp, hybrid, loss, parts, replicated, same, train

DENSE = gradwire.DensePolicy(below=200)


class Run:
    """A sharded model, SGD with momentum, and a handle."""

    def __init__(self, method: str, **arguments: Any) -> None:
        self.model = hsdp()
        self.handle = gradwire.compress(self.model, method, dense=DENSE, **arguments)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def steps(self, steps: range) -> list[Tensor]:
        for step in steps:
            self.optimizer.zero_grad()
            loss(self.model, step).backward()
            self.optimizer.step()
        return parts(self.model)

    def state(self) -> dict[str, Any]:
        """As FSDP has it: DTensors, and what each rank remembers."""
        return {
            "model": self.model.state_dict(),
            "optimizer": {str(number): each for number, each in self.optimizer.state_dict()["state"].items()},
            "gradwire": gradwire.PerRank(self.handle),
        }


def restarted(method: str, options: dict[str, Any], folder: str) -> None:
    first = Run(method, **options)
    first.steps(range(3))
    dcp.save(first.state(), checkpoint_id=folder)
    expected = first.steps(range(3, 6))
    first.handle.close()
    second = Run(method, **options)
    second.steps(range(1))  # so that there is state to load into
    second.model.zero_grad()
    dcp.load(second.state(), checkpoint_id=folder)
    second.model.load_state_dict(second.model.state_dict())
    assert same(second.steps(range(3, 6)), expected)
    second.handle.close()


@pytest.mark.parametrize(
    ("method", "options"), [("acpsgd", {"rank": 2}), ("topk", {"ratio": 0.1}), ("qsgd", {"bits": 4})]
)
def test_a_run_that_goes_on_gives_the_same_bits(
    pool: Pool, method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    pool.run(4, restarted, method, options, str(tmp_path))


def saved(method: str = "topk", build: Callable[[], Any] = hsdp, steps: int = 2) -> dict[str, Any]:
    model = build()
    with closing(gradwire.compress(model, method, dense=DENSE)) as handle:
        train(model, range(steps))
        buffer = io.BytesIO()
        torch.save(handle.state_dict(), buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


@ranks(4)
def test_a_state_belongs_to_a_shard() -> dict[str, Any]:
    state, rank = saved(), dist.get_rank()
    assert state["parameters"]["first.weight"] == {
        "shape": [65 if rank % 2 == 0 else 64, 48],
        "dtype": "torch.float32",
        "part": f"Shard(dim=0) {rank % 2} of 2 of (129, 48)",
    }
    gathered: list[dict[str, Any]] = [{}] * 4
    dist.all_gather_object(gathered, state)
    model = hsdp()
    with closing(gradwire.compress(model, "topk", dense=DENSE)) as handle:
        with pytest.raises(ConfigurationError, match=r"which is part Shard\(dim=0\) . of 2 .* cut in the same way"):
            handle.load_state_dict(gathered[rank ^ 1])  # of the other shard
        with pytest.raises(ConfigurationError, match=r"which is part .* cut in the same way"):
            handle.load_state_dict({**saved(build=replicated), "rank": rank // 2, "world_size": 2})
        with pytest.raises(ConfigurationError, match=r"saved by rank ., this is rank ."):
            handle.load_state_dict(gathered[rank ^ 2])  # of the other replica
        handle.load_state_dict(state)
    of_this_shard = [gathered[rank % 2], gathered[rank % 2 + 2]]
    (alone,) = gradwire.redistribute(of_this_shard, workers=1)
    mean = (
        of_this_shard[0]["tensors"]["residual"]["first.weight"].double()
        + of_this_shard[1]["tensors"]["residual"]["first.weight"]
    ) / 2
    assert torch.equal(alone["tensors"]["residual"]["first.weight"], mean.float())
    assert "part" not in saved(build=replicated)["parameters"]["first.weight"]
    with pytest.raises(ConfigurationError, match="which is part"):
        gradwire.redistribute([gathered[0], {**gathered[1], "rank": 1}], workers=1)
    return {}


def spoil(model: Any) -> None:
    """A gradient that is infinite in the last row of the first layer, which the second shard has."""

    def hook(module: nn.Module, arguments: Any, output: Tensor) -> None:
        def infinite(gradient: Tensor) -> Tensor:
            spoilt = gradient.clone()
            spoilt[:, 128] = float("inf")
            return spoilt

        if output.requires_grad:
            output.register_hook(infinite)

    model.first.register_forward_hook(hook)


def taken_back(rollback: bool | None, scaled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=True) if scaled else None
    run = Run("topk", ratio=0.1, rollback=rollback, grad_scaler=scaler)
    good = run.steps(range(2)) if scaler is None else None
    before = run.handle.state_dict()
    spoil(run.model)
    run.optimizer.zero_grad()
    weights = [each.clone() for each in parts(run.model)]
    if scaler is None:
        loss(run.model, 2).backward()
    else:
        scaler.scale(loss(run.model, 2)).backward()
        scaler.step(run.optimizer)
        scaler.update()
        assert same(parts(run.model), weights)
        assert scaler.get_scale() == 2.0
    after = run.handle.state_dict()
    assert after["step"] == before["step"]
    for field, tensors in after["tensors"].items():
        kept = before["tensors"].get(field, {})
        for name, tensor in tensors.items():
            assert torch.equal(tensor, kept.get(name, torch.zeros_like(tensor))), (field, name)
    assert good is None or same(good, weights)
    run.handle.close()


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_that_is_bad_on_one_shard_is_taken_back_on_all(pool: Pool, scaled: bool) -> None:
    pool.run(4, taken_back, None if scaled else True, scaled)


def refused(action: Callable[[], object], wanted: str, kind: type[Exception] = ConfigurationError) -> None:
    with pytest.raises(kind, match=wanted):
        action()


@ranks(4)
def test_what_cannot_be_attached_to() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

    mesh = hybrid()
    refused(lambda: gradwire.compress(Net(), "topk"), r"model is a Net; wrap it in .* or call .*fully_shard, first")
    refused(lambda: gradwire.compress(DistributedDataParallel(Net()), "topk", process_group=mesh["shard"]), "DDP has")
    old = FullyShardedDataParallel(Net(), process_group=mesh["shard"].get_group(), device_id=torch.device("cpu"))
    refused(lambda: gradwire.compress(old, "topk"), "which is FSDP1; shard the model by .*fully_shard, which is FSDP2")
    sharded = hsdp(mesh=mesh["shard"])
    refused(lambda: gradwire.compress(sharded, "topk"), "no average over replicas is sent .* or give process_group")
    refused(
        lambda: gradwire.compress(sharded, "topk", process_group=mesh["shard"]),
        "hold different parts of it; give the group of its replicas",
    )
    refused(lambda: gradwire.compress(hsdp(), "topk", process_group=mesh["shard"]), "leave process_group out")
    net = Net()
    fully_shard(net.first, mesh=mesh)
    refused(lambda: gradwire.compress(net, "topk"), r"'first' went through fully_shard and the model around it did not")
    mixed = Net()
    fully_shard(mixed.first, mesh=mesh["shard"])
    fully_shard(mixed, mesh=mesh)
    refused(lambda: gradwire.compress(mixed, "topk"), r"replicas on different ranks, \(\d, \d\) and none; use one mesh")
    half = MixedPrecisionPolicy(torch.float16, torch.float16)
    refused(lambda: gradwire.compress(hsdp(mp_policy=half), "topk"), r"reduces in float16.*reduce_dtype=torch.float32")
    for attach in (gradwire.compress, gradwire.compress_reduce_scatter):
        refused(partial(attach, hsdp(Net().double()), "qsgd"), r"reduces in float64.*=torch.float32")
    several = Net()
    several.first.to(torch.bfloat16)
    fully_shard(several, mesh=mesh)
    refused(lambda: gradwire.compress(several, "topk"), "has parameters of several dtypes.*those of each dtype by")
    summed = hsdp()
    summed.first.set_force_sum_reduction_for_comms(True)
    refused(lambda: gradwire.compress(summed, "topk"), "divides gradients after they were summed.*leave out")
    model = hsdp()
    loss(model, 0).backward()
    refused(lambda: gradwire.compress(model, "topk"), "has run a backward pass already.*or after zero_grad")
    model.zero_grad()
    with closing(gradwire.compress(model, "dense")):
        refused(lambda: gradwire.compress(model, "topk"), r"'norm\.weight' has an all-reduce hook already")
        loss(model, 0).backward()
    refused(lambda: loss(model, 1).backward(), "the handle was closed", GradwireError)


@ranks(4)
def test_another_fsdp_is_named() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    model, theirs = hsdp(), FSDPState._root_post_backward_final_callback
    del FSDPState._root_post_backward_final_callback
    try:
        refused(
            lambda: gradwire.compress(model, "topk"), r"another inside than gradwire knows.*it goes with torch 2\.11"
        )
    finally:
        FSDPState._root_post_backward_final_callback = theirs
    gradwire.compress(model, "topk").close()


UNUSED = "set_reduce_scatter_unused_params"
"""What models have that reduce zeros for parameters that took no part."""


def unused(remedy: str) -> None:
    """One parameter of a group takes no part in the loss."""
    model = hsdp()
    model.scaled = False
    with closing(gradwire.compress(model, "dense")):
        refused(lambda: loss(model, 0).backward(), f"took no part in the loss.*{remedy}")
    if not fsdp_has(UNUSED):
        return
    model = hsdp()
    model.scaled = False
    with closing(gradwire.compress(model, "dense")) as handle:
        model.set_reduce_scatter_unused_params(True)
        loss(model, 0).backward()
        assert handle.stats().steps == 1


def test_parameters_that_take_no_part(pool: Pool) -> None:
    """The error has the remedy that there is in this torch."""
    pool.run(4, unused, f"call model.{UNUSED}" if fsdp_has(UNUSED) else "fully_shard these by themselves")


@ranks(4)
def test_what_cannot_be_averaged() -> None:
    from torch.distributed.fsdp import fully_shard

    def attached() -> Any:
        model = hsdp()
        handles.append(gradwire.compress(model, "dense"))
        return model

    handles: list[gradwire.Handle] = []
    stepping = attached()
    stepping.last.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    refused(lambda: loss(stepping, 0).backward(), "post-accumulate-grad hook.*step the optimizer after backward")

    summed = attached()
    summed.last.set_force_sum_reduction_for_comms(True)
    refused(lambda: loss(summed, 0).backward(), "divides gradients after they were summed")

    net = Net()
    net.first.requires_grad_(False)
    thawed = hsdp(net)
    handles.append(gradwire.compress(thawed, "dense"))
    thawed.first.requires_grad_(True)
    refused(lambda: loss(thawed, 0).backward(), "'first.weight' was frozen when the method was attached")

    outer = nn.Sequential(attached(), nn.Linear(5, 3))
    fully_shard(outer, mesh=hybrid())
    refused(lambda: loss(outer, 0).backward(), "sharded further after gradwire.compress")
    for handle in handles:
        handle.close()


def broken_off() -> None:
    broken = hsdp()
    handle = gradwire.compress(broken, "dense")

    def interrupt(module: nn.Module, arguments: Any, output: Tensor) -> None:
        def raise_it(gradient: Tensor) -> Tensor:
            raise KeyboardInterrupt

        if output.requires_grad and armed:
            output.register_hook(raise_it)

    armed = [True]
    broken.first.register_forward_hook(interrupt)
    refused(lambda: loss(broken, 0).backward(), "", KeyboardInterrupt)
    armed.clear()
    broken.reset_iter_state()
    broken.zero_grad()
    refused(lambda: loss(broken, 1).backward(), "an earlier backward pass was broken off", GradwireError)
    handle.close()


def test_a_backward_pass_that_was_broken_off(pool: Pool) -> None:
    if not fsdp_has("reset_iter_state"):
        pytest.skip(f"FSDP2 of torch {torch.__version__} has no reset_iter_state")
    pool.run(4, broken_off)


def of_four(rank: int, folder: str, scatter: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=4, timeout=timedelta(seconds=40)
    )
    model = hsdp()
    handle = gradwire.compress_reduce_scatter(model, "qsgd") if scatter else gradwire.compress(model, "topk", ratio=0.1)
    try:
        for step in range(6):
            if rank == 3 and step == 3:
                handle.wire.submit = lambda *_: os._exit(0)  # type: ignore[method-assign]
            loss(model, step).backward()
            model.zero_grad()
    except Exception as error:
        Path(folder, str(rank)).write_text(f"{type(error).__name__}: {error}")
        handle.close()


@pytest.mark.parametrize("scatter", [False, True])
def test_a_rank_that_dies_ends_others_with_a_wire_error(tmp_path: Path, scatter: bool) -> None:
    """All of them, whatever was under way; it dies in the midst of backward.

    Of a reduce-scatter alone those of the other replica may meet it in FSDP's own all-reduce, which nobody is told of.
    """
    processes = [FORKING.Process(target=of_four, args=(rank, str(tmp_path), scatter)) for rank in range(4)]
    for each in processes:
        each.start()
    for each in processes:
        each.join(120)
        assert each.exitcode is not None
    said = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    for each in said[2:] if scatter else said:
        assert each.startswith(f"{WireError.__name__}: "), said
        assert "start all workers again from the last checkpoint" in each
    assert all(each.startswith((WireError.__name__, "RuntimeError")) for each in said)


def example(folder: str) -> list[float]:
    spec = importlib.util.spec_from_file_location("hsdp_example", Path(__file__).parents[2] / "examples" / "hsdp.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    at_once, stats = module.train(Path(folder, "at-once"), 40)
    assert stats.steps == 40
    assert stats.ratio > 2
    first, _ = module.train(Path(folder, "in-parts"), 20)
    again, stats = module.train(Path(folder, "in-parts"), 40)
    assert stats.steps == 20
    assert again == at_once < first
    return [first, again]


def test_the_example_trains_and_goes_on(pool: Pool, tmp_path: Path) -> None:
    pool.run(4, example, str(tmp_path))
