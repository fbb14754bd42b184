"""Accelerate: attached before ``prepare``, saved and loaded with ``save_state`` and ``load_state``."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from gradwire.errors import ConfigurationError
from launched import begun, launched, owed, scaled_by, warnings_of_gradwire
from models import batch, flat, network, same_everywhere
from pool import Pool

pytest.importorskip("accelerate")

METHODS: list[tuple[str, dict[str, Any]]] = [("acpsgd", {"rank": 4}), ("topk", {"ratio": 0.05}), ("efsignsgd", {})]


def accelerated(method: str | None, options: dict[str, Any], **arguments: Any) -> tuple[Any, Any, Any, Any]:
    """An accelerator with its attachment, prepared model and optimizer."""
    from accelerate import Accelerator

    from gradwire.integrations.accelerate import compress

    accelerator = Accelerator(cpu=True, **arguments)
    attachment = compress(accelerator, method, **options) if method else None
    net = network()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    return accelerator, attachment, model, optimizer


def train(accelerator: Any, model: Any, optimizer: Any, steps: range) -> Tensor:
    for step in steps:
        inputs, labels = batch(dist.get_rank() if dist.is_initialized() else 0, step)
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


@launched()
def resumes(folder: str, method: str, options: dict[str, Any]) -> tuple[bytes, bytes]:
    """Three steps, saving, three more; and the latter again from what was saved."""
    run, attachment, model, optimizer = accelerated(method, options)
    train(run, model, optimizer, range(3))
    run.save_state(folder)
    went_on = train(run, model, optimizer, range(3, 6))
    assert attachment.stats().steps == 6
    assert attachment.stats().ratio > 1
    assert list(attachment.figures())[:4] == [
        f"gradwire/{each}" for each in ("steps", "dense_bytes", "wire_bytes", "ratio")
    ]
    assert attachment.figures()["gradwire/recent/steps"] == 0
    attachment.close()
    again, attachment, model, optimizer = accelerated(method, options)
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    again.load_state(folder)
    resumed = train(again, model, optimizer, range(3, 6))
    attachment.close()
    return went_on.numpy().tobytes(), resumed.numpy().tobytes()


@pytest.mark.parametrize(("method", "options"), METHODS, ids=[name for name, _ in METHODS])
def test_a_run_that_goes_on_gives_the_same_bits(pool: Pool, tmp_path: Path, method: str, options: Any) -> None:
    results = pool.run(2, resumes, str(tmp_path), method, options)
    assert len({each for result in results for each in result}) == 1


@launched()
def accumulates() -> tuple[float, int]:
    """Accelerate's accumulation through ``dense`` is what it is without gradwire; only whole steps send."""
    run, attachment, model, optimizer = accelerated("dense", {}, gradient_accumulation_steps=2)
    ours = train(run, model, optimizer, range(6))
    steps = attachment.stats().steps
    attachment.close()
    run, _, model, optimizer = accelerated(None, {}, gradient_accumulation_steps=2)
    return float((ours - train(run, model, optimizer, range(6))).abs().max()), steps


def test_accumulation(pool: Pool) -> None:
    for difference, steps in pool.run(2, accumulates):
        assert difference < 1e-6
        assert steps == 3


@launched()
def saved_by_all(folder: str) -> Tensor:
    run, attachment, model, optimizer = accelerated("topk", {"ratio": 0.05})
    train(run, model, optimizer, range(3))
    run.save_state(folder)
    remembered = owed(attachment)
    attachment.close()
    return remembered


@launched()
def loaded_by_others(folder: str) -> Tensor:
    run, attachment, _, _ = accelerated("topk", {"ratio": 0.05})
    run.load_state(folder)
    remembered = owed(attachment)
    attachment.close()
    return remembered


def test_another_number_of_workers_owes_as_much(pool: Pool, tmp_path: Path) -> None:
    before = torch.stack(pool.run(3, saved_by_all, str(tmp_path)))
    for workers in (2, 3):
        after = torch.stack(pool.run(workers, loaded_by_others, str(tmp_path)))
        torch.testing.assert_close(after.mean(0), before.mean(0))
    assert torch.equal(after, before)
    pool.run(2, saved_by_all, str(tmp_path))
    assert sorted(path.name for path in tmp_path.glob("gradwire*")) == ["gradwire-rank-0.pt", "gradwire-rank-1.pt"]


@launched()
def misuses(folder: str) -> None:
    from accelerate import Accelerator, DistributedType
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    from gradwire.integrations.accelerate import compress

    run, attachment, model, optimizer = accelerated("efsignsgd", {})
    with pytest.raises(ConfigurationError, match=r"prepared a model already.*before accelerator\.prepare"):
        compress(run, "topk")
    unused = Accelerator(cpu=True)
    compress(unused, "topk")
    with pytest.raises(ConfigurationError, match="has a method of gradwire's already"):
        compress(unused, "topk")
    kwargs = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    with pytest.raises(ConfigurationError, match=r"comm_hook='fp16'.*leave that out"):
        compress(Accelerator(cpu=True, kwargs_handlers=[kwargs]), "topk")
    with (
        mock.patch.object(Accelerator, "distributed_type", DistributedType.DEEPSPEED),
        pytest.raises(ConfigurationError, match="trains with DEEPSPEED, whose averages are not DDP's"),
    ):
        compress(unused, "topk")
    with pytest.raises(ConfigurationError, match="accelerator is a Linear"):
        compress(nn.Linear(2, 2), "topk")
    with pytest.raises(ConfigurationError, match="method"):
        accelerated("topkk", {})
    train(run, model, optimizer, range(1))
    run.save_state(folder)
    dist.barrier()
    if dist.get_rank() == 1:
        Path(folder, "gradwire-rank-1.pt").unlink()
    dist.barrier()
    message = "there is no .*gradwire-rank-1.pt" if dist.get_rank() else "rank 1 could not load its state"
    with pytest.raises(ConfigurationError, match=message):
        run.load_state(folder)
    attachment.close()


def test_misuse_is_told(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, misuses, str(tmp_path))


@launched()
def prepares_several() -> None:
    run, attachment, _, _ = accelerated("efsignsgd", {})
    (first,) = attachment.handles
    run.prepare(network())
    assert attachment.handles[0] is first
    assert len(attachment.handles) == 2
    run.free_memory()
    run.prepare(network())
    (third,) = attachment.handles
    assert third is not first
    attachment.close()


def test_several_models_and_new_ones(pool: Pool) -> None:
    pool.run(2, prepares_several)


@launched()
def takes_what_ddp_is_given() -> None:
    from accelerate.utils import DistributedDataParallelKwargs

    kwargs = DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=3)
    run, attachment, model, _ = accelerated("efsignsgd", {}, kwargs_handlers=[kwargs])
    assert model.find_unused_parameters
    assert model.bucket_bytes_cap == 3 * 2**20
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    attachment.close()
    from accelerate import Accelerator

    from gradwire.integrations.accelerate import compress

    run = Accelerator(cpu=True)
    run.scaler = scaler  # which Accelerate makes on GPUs only
    attachment = compress(run, "efsignsgd")
    run.prepare(network())
    assert scaled_by(attachment, scaler)
    attachment.close()


def test_what_ddp_and_scaler_are_given(pool: Pool) -> None:
    pool.run(2, takes_what_ddp_is_given)


@launched()
def starts_empty(folder: str) -> list[str]:
    run, _, model, optimizer = accelerated(None, {})
    train(run, model, optimizer, range(2))
    run.save_state(folder)
    run, attachment, model, optimizer = accelerated("topk", {"ratio": 0.05})
    with warnings_of_gradwire() as lines:
        run.load_state(folder)
    train(run, model, optimizer, range(2, 3))
    assert attachment.stats().steps == 1
    run.save_state(folder)
    attachment.close()
    return lines


@launched()
def forgets(folder: str) -> tuple[bytes, bytes]:
    """A run that has averaged goes on from such a checkpoint as one does that has not."""
    run, _, model, optimizer = accelerated(None, {})
    run.save_state(folder)
    ends = []
    for steps in (2, 0):
        run, attachment, model, optimizer = accelerated("topk", {"ratio": 0.05})
        train(run, model, optimizer, range(steps))
        run.load_state(folder)
        assert begun(attachment)
        ends.append(train(run, model, optimizer, range(2, 5)).numpy().tobytes())
        attachment.close()
    return ends[0], ends[1]


@launched()
def alone(folder: str) -> list[str]:
    with warnings_of_gradwire() as lines:
        run, attachment, model, optimizer = accelerated("efsignsgd", {})
        train(run, model, optimizer, range(2))
        run.load_state(folder)
    assert attachment.stats() == gradwire.Stats(0, 0, 0, {})
    assert attachment.figures() == {}
    return lines


def test_a_checkpoint_without_states_starts_empty(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, starts_empty, str(tmp_path))
    assert first == [f"{tmp_path} has no states of gradwire: what compression remembers starts empty"]
    assert second == []


def test_a_checkpoint_without_states_has_all_forgotten(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(2, forgets, str(tmp_path))
    assert len({each for result in results for each in result}) == 1


def test_a_process_alone_sends_nothing(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, starts_empty, str(tmp_path))
    assert pool.run(1, alone, str(tmp_path))[0] == [
        "one process trains alone: nothing is sent, so nothing is compressed",
        f"{tmp_path} has states of gradwire; a process that trains alone leaves them out",
    ]


@launched()
def attaches_by_hand() -> list[dict[str, float]]:
    """Without the integration: to what ``prepare`` returned; and figures go to a tracker of Accelerate's."""
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    logged: list[dict[str, float]] = []

    class Tracker(GeneralTracker):  # type: ignore[misc]
        name = "list"
        requires_logging_directory = False
        tracker = None

        def store_init_configuration(self, values: dict[str, Any]) -> None:
            pass

        def log(self, values: dict[str, float], step: int | None = None, **options: Any) -> None:
            logged.append({**values, "step": step or 0})

    run = Accelerator(cpu=True, log_with=Tracker(_blank=True))
    run.init_trackers("gradwire")
    net = network()
    model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    handle = gradwire.compress(model, "topk", ratio=0.05)
    for step in range(3):
        weights = train(run, model, optimizer, range(step, step + 1))
        run.log(handle.stats().as_dict("gradwire/"), step=step)
    assert handle.stats().steps == 3
    assert same_everywhere(weights)
    handle.close()
    return logged


def test_a_prepared_model_and_a_tracker(pool: Pool) -> None:
    first, second = pool.run(2, attaches_by_hand)
    assert [each["gradwire/steps"] for each in first] == [1, 2, 3] == [1 + each["step"] for each in first]
    assert first[-1]["gradwire/ratio"] > 1
    assert second == []  # Accelerate's main process logs


@launched()
def takes_local_steps() -> int:
    from accelerate import Accelerator

    run = Accelerator(cpu=True)
    net = network()
    optimizer = run.prepare_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    assert type(optimizer).__name__ == "AcceleratedOptimizer"
    options: dict[str, Any] = {"method": "qsgd", "bits": 8, "parameters": net.named_parameters()}
    handle = gradwire.periodic(optimizer, every=2, **options)
    weights = train(run, net, optimizer, range(4))
    assert same_everywhere(weights)
    assert not same_everywhere(train(run, net, optimizer, range(4, 5)))
    handle.close()
    return handle.syncs


def test_local_steps_of_an_accelerated_optimizer(pool: Pool) -> None:
    assert pool.run(2, takes_local_steps) == [2, 2]


@launched()
def joins() -> Tensor:
    """Rank 0 has three batches and rank 1 five; as Accelerate does it on GPUs, and on the CPU does not."""
    from accelerate import Accelerator

    run, attachment, model, optimizer = accelerated("topk", {"ratio": 0.05})
    several = mock.patch.object(Accelerator, "multi_device", True)
    with several, run.join_uneven_inputs([model], even_batches=False):
        train(run, model, optimizer, range(3 + 2 * dist.get_rank()))
    (handle,) = attachment.handles
    assert handle.stats().steps == 5
    attachment.close()
    return flat(model)


def test_uneven_inputs(pool: Pool) -> None:
    """DDP sends those that have ended the weights of one that has not."""
    first, second = pool.run(2, joins)
    assert torch.equal(first, second)
