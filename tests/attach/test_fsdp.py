"""The average over the replicas of what FSDP2 has sharded: as FSDP's own, as every other way in, same on replicas."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import gradwire
from catalogue import cases
from gradwire.engine.configuration import Configuration
from gradwire.layout import Slot, flat_slots
from gradwire.local.world import LocalWorld
from gradwire.wire import Meter
from models import SHAPES, gradient
from pool import Pool, ranks
from sharded import (
    Net,
    close,
    divided,
    fsdp_has,
    hsdp,
    hybrid,
    loss,
    parts,
    replicated,
    same,
    same_on_replicas,
    train,
)

STEPS = range(3)
Body = Callable[[nn.Module, int], None]


def plain(model: nn.Module, step: int) -> None:
    loss(model, step).backward()


def accumulate_unsharded(model: Any, step: int) -> None:
    for part in range(3):
        model.set_requires_gradient_sync(part == 2)
        model.set_is_last_backward(part == 2)
        (loss(model, 10 * step + part) / 3).backward()


def accumulate_on_shards(model: Any, step: int) -> None:
    for part in range(3):
        model.set_requires_all_reduce(part == 2)
        (loss(model, 10 * step + part) / 3).backward()


def accumulate_averages(model: Any, step: int) -> None:
    for part in range(2):
        (loss(model, 10 * step + part) / 2).backward()


def keep_gradients(model: Any, step: int) -> None:
    """Gradients that are zeroed in place stay the same tensors."""
    loss(model, step).backward()
    before = [each.grad for each in model.parameters()]
    model.zero_grad(set_to_none=False)
    loss(model, step + 1).backward()
    assert all(one is each.grad for one, each in zip(before, model.parameters(), strict=True))


def clip(model: Any, step: int) -> None:
    loss(model, step).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


BODIES: list[Body] = [
    plain,
    accumulate_unsharded,
    accumulate_on_shards,
    accumulate_averages,
    keep_gradients,
    clip,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@ranks(4)
def test_dense_is_what_fsdp_averages_itself(body: Body) -> None:
    expected = train(hsdp(), STEPS, body)
    for granularity in ("layer", "model"):
        model = hsdp()
        handle = gradwire.compress(model, "dense", granularity=granularity)
        placements = [each.placements for each in model.parameters()]
        assert close(train(model, STEPS, body), expected)
        assert [each.placements for each in model.parameters()] == placements
        assert handle.stats().steps in (len(STEPS), 2 * len(STEPS))
        handle.close()


def frozen() -> nn.Module:
    net = Net()
    net.first.requires_grad_(False)
    net.norm.bias.requires_grad_(False)
    return net


def checkpointed(reentrant: bool) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    net = Net()
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    net.second = checkpoint_wrapper(net.second, kind)
    return net


def by_columns(parameter: nn.Parameter) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % 2 == 0 else None


def biases_apart() -> Any:
    """Two parameter groups a module: weights are cut over one mesh, biases over another of the same ranks."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, ShardPlacementResult

    other = HSDPMeshInfo(hybrid("biases"), shard_mesh_dim=1, replicate_mesh_dim=0)

    def place(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(None, other) if parameter.dim() == 1 else None

    return hsdp(shard_placement_fn=place)


def policies() -> dict[str, Callable[[], Any]]:
    """How models are sharded otherwise, and in what precision."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    bfloat16, float32 = torch.bfloat16, torch.float32
    return {
        "kept": lambda: hsdp(reshard_after_forward=False),
        "frozen": lambda: hsdp(frozen()),
        "checkpointed": lambda: hsdp(checkpointed(False)),
        "checkpointed, reentrant": lambda: hsdp(checkpointed(True)),
        "columns": lambda: hsdp(shard_placement_fn=by_columns),
        "offloaded": lambda: hsdp(offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "reduced in float32": lambda: hsdp(mp_policy=MixedPrecisionPolicy(bfloat16, float32)),
        "reduced in bfloat16": lambda: hsdp(mp_policy=MixedPrecisionPolicy(bfloat16, bfloat16)),
        "bfloat16": lambda: hsdp(Net().bfloat16(), mp_policy=MixedPrecisionPolicy(bfloat16, float32)),
        "replicated": replicated,
        "summed": lambda: divided(hsdp(), 2.0),
        "replicated and summed": lambda: divided(replicated(), 3.0),
    }


def as_fsdp_does(build: Callable[[], Any], rounding: float = 1e-6) -> bool:
    expected, model = train(build(), STEPS), build()
    with closing(gradwire.compress(model, "dense")):
        return close(train(model, STEPS), expected, rounding)


@ranks(4)
def test_dense_is_what_fsdp_averages_under_other_policies() -> None:
    for name, build in policies().items():
        assert as_fsdp_does(build, 2e-2 if "bfloat16" in name else 1e-6), name


def test_dense_is_what_fsdp_averages_in_several_groups_of_a_module(pool: Pool) -> None:
    if not fsdp_has("ShardPlacementResult"):
        pytest.skip(f"FSDP2 of torch {torch.__version__} has one parameter group a module")
    assert all(pool.run(4, as_fsdp_does, biases_apart))


@ranks(4)
def test_dense_is_what_ddp_averages() -> None:
    """With FSDP's own mesh of two dimensions, of one and a group of replicas, and of none."""
    expected = parts(_trained(DistributedDataParallel(Net()), "dense"))
    for build, group in WAYS:
        model = _trained(build(), "dense", process_group=group())
        assert close([each.full_tensor() for each in model.parameters()], expected)


WAYS: list[tuple[Callable[[], Any], Callable[[], DeviceMesh | None]]] = [
    (hsdp, lambda: None),
    (hsdp, lambda: hybrid()["replicate"]),
    (lambda: hsdp(mesh=hybrid()["shard"]), lambda: hybrid()["replicate"]),
    (replicated, lambda: None),
]


@ranks(4)
def test_a_synchronizer_over_the_same_replicas_is_refused() -> None:
    """It would average what is averaged in the backward pass; once that is over, it may."""
    model = hsdp()
    handle = gradwire.compress(model, "topk")
    sync = gradwire.Synchronizer(model, "dense", process_group=hybrid()["replicate"])
    loss(model, 0).backward()
    with pytest.raises(gradwire.ConfigurationError, match=r"averaged by gradwire\.compress in the backward pass"):
        sync.synchronize()
    handle.close()
    sync.synchronize()
    assert sync.stats().steps == 1


def _trained(model: nn.Module, method: str, steps: range = STEPS, **arguments: Any) -> Any:
    with closing(gradwire.compress(model, method, **arguments)):
        train(model, steps)
    return model


@ranks(4)
def test_averages_go_out_while_backward_goes_on() -> None:
    """Backward is held up at the first layer, on all ranks, until the wire has sent what later layers have."""
    for method in ("dense", "topk", "acpsgd"):
        model = hsdp()
        sent: list[int] = []
        with closing(gradwire.compress(model, method, fuse_bytes=1, dense=gradwire.DensePolicy(below=200))) as handle:
            meter = handle.engine.meter

            def hold(gradient: Tensor, meter: Meter = meter, sent: list[int] = sent) -> None:
                until = time.monotonic() + 60
                while not meter.wire_bytes and time.monotonic() < until:
                    time.sleep(0.01)
                sent.append(meter.wire_bytes)

            def begin(module: nn.Module, given: Any, output: Tensor, hold: Callable[[Tensor], None] = hold) -> None:
                output.register_hook(hold)

            model.first.register_forward_hook(begin)
            loss(model, 0).backward()
            assert 0 < sent[0] < handle.stats().wire_bytes, method


@ranks(4)
def test_methods_begin_after_dense_steps() -> None:
    """The first steps are dense, then every parameter's own method begins as if it were attached then."""
    mixed = {"first.*": "qsgd:bits=8", "*": "topk:ratio=0.1"}
    model, expected = hsdp(), hsdp()
    with closing(gradwire.compress(model, mixed, start=2)) as handle, closing(gradwire.compress(expected, "dense")):
        assert same(train(model, range(2)), train(expected, range(2)))
        handle.pause()
        assert same(train(model, range(2, 3)), train(expected, range(2, 3)))
        handle.resume()
        fresh = hsdp()
        with torch.no_grad():
            for one, other in zip(fresh.parameters(), model.parameters(), strict=True):
                one.copy_(other)
        with closing(gradwire.compress(fresh, mixed)):
            found = train(model, range(3, 5))
            assert same(found, train(fresh, range(3, 5)))
        assert same_on_replicas(found)
        assert not same(found, train(expected, range(3, 5)))


@ranks(4)
def test_options_change_while_training_goes_on() -> None:
    """By hand and by a schedule the same bits; what is owed comes with the dense average that ends it."""
    dense = gradwire.DensePolicy(below=200)
    model, expected = hsdp(), hsdp()
    schedule = {0: 1, 2: 3, 4: 2}
    with (
        closing(gradwire.compress(model, "acpsgd", rank=1, dense=dense)) as handle,
        closing(gradwire.compress(expected, "acpsgd", rank=schedule, dense=dense)),
    ):
        for step in range(6):
            if step in schedule:
                handle.change(rank=schedule[step])
            assert same(train(model, range(step, step + 1)), train(expected, range(step, step + 1)))
        handle.change("dense")
        assert same_on_replicas(train(model, range(6, 7)))
        assert not handle.state_dict()["tensors"].keys() - {"p", "q"}


METHODS: list[tuple[str, dict[str, Any]]] = [
    ("topk", {"ratio": 0.05}),
    ("acpsgd", {"rank": 2}),
    ("powersgd", {"rank": 2}),
    ("efsignsgd", {"route": "sharded", "granularity": "bucket"}),
    ("qsgd", {"bits": 4}),
    ("topk", {"ratio": 0.05, "granularity": "model"}),
    ("dgc", {"ratio": 0.1}),
]


@pytest.mark.parametrize(("method", "options"), METHODS[:3])
@ranks(4)
def test_shards_are_averaged_as_by_a_synchronizer(method: str, options: dict[str, Any]) -> None:
    """FSDP reduces over the shards only, and a Synchronizer averages what it leaves over the replicas."""
    reference, dense = hsdp(mesh=hybrid()["shard"]), gradwire.DensePolicy(below=200)
    with closing(
        gradwire.Synchronizer(
            reference.named_parameters(), method, process_group=hybrid()["replicate"], dense=dense, **options
        )
    ) as sync:

        def body(model: nn.Module, step: int) -> None:
            loss(model, step).backward()
            sync.synchronize()

        expected = train(reference, STEPS, body)
        owed = sync.state_dict()["tensors"]
    model = hsdp()
    with closing(gradwire.compress(model, method, dense=dense, **options)) as handle:
        assert same(train(model, STEPS), expected)
        assert same_on_replicas(parts(model))
        for field, tensors in handle.state_dict()["tensors"].items():
            assert all(torch.equal(tensor, owed[field][name]) for name, tensor in tensors.items()), (method, field)
        assert handle.stats().steps == len(STEPS)


@pytest.mark.parametrize(("method", "options"), METHODS[1:])
@ranks(4)
def test_replicas_have_the_same_bits(method: str, options: dict[str, Any]) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    for reduce in (torch.float32, torch.bfloat16):
        model = hsdp(mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce))
        dense, half = gradwire.DensePolicy(below=200), reduce == torch.bfloat16
        with closing(gradwire.compress(model, method, dense=dense, verify_every=1, **options)) as handle:
            assert same_on_replicas(train(model, STEPS, accumulate_on_shards if half else plain))
            assert all(bool(each.isfinite().all()) for each in parts(model))
            elements = sum(-(-each.shape[0] // 2) * each[0].numel() for each in Net().parameters())  # of padded parts
            assert handle.stats().dense_bytes == len(STEPS) * elements * (2 if half else 4)


def test_padding_between_shards_changes_no_bit() -> None:
    """FSDP's buffers have gaps where a part is smaller than the first; what laws hold without them hold with them.

    Gaps of 64 bytes: below that the last bits of BLAS' products depend on where an operand lies (gradiveq's residual).
    """
    slots = flat_slots([*SHAPES.items(), ("nothing", (0, 7))])
    gapped = [Slot(each.name, each.shape, each.offset + 16 * index) for index, each in enumerate(slots)]
    for case in {case.method: case for case in reversed(cases("residual"))}.values():
        configuration = Configuration.make(case.method, case.options, *case.choices)
        worlds = [LocalWorld(configuration, layout, workers=2) for layout in (slots, gapped)]
        for step in range(2):
            averages: list[list[Tensor]] = []
            for world, layout in zip(worlds, (slots, gapped), strict=True):
                buffers = [torch.zeros(layout[-1].stop) for _ in range(2)]
                for rank, buffer in enumerate(buffers):
                    for slot in layout[:-1]:
                        buffer[slot.offset : slot.stop] = gradient(slot.name, rank, step).flatten()
                world.average(buffers)
                averages.append([buffers[0][slot.offset : slot.stop] for slot in layout])
                for slot in layout:
                    buffers[0][slot.offset : slot.stop] = 0
                assert not buffers[0].any(), str(case)
            assert same(*averages), str(case)
        states = [engine.store.state() for world in worlds for engine in world.engines]
        for without, within in ((states[0], states[2]), (states[1], states[3])):
            for field, tensors in without.items():
                assert all(torch.equal(tensor, within[field][name]) for name, tensor in tensors.items()), str(case)
