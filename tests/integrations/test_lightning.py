"""Lightning and Fabric: one callback, whose state holds that of all ranks."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from gradwire.errors import ConfigurationError
from launched import begun, launched, owed, scaled_by, warnings_of_gradwire
from models import batch, flat, network, same_everywhere
from pool import Pool

pytest.importorskip("lightning")
pytest.importorskip("accelerate")  # whose state launched() resets

METHODS: list[tuple[str, dict[str, Any]]] = [("acpsgd", {"rank": 4}), ("topk", {"ratio": 0.05})]


def module() -> Any:
    """A small classifier; its samples follow from rank and step."""
    from lightning.pytorch import LightningModule

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, samples: tuple[Tensor, Tensor], number: int) -> Tensor:
            inputs, labels = samples
            return nn.functional.cross_entropy(self.network(inputs), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    return Classifier()


def loader() -> Any:
    """Three batches of this rank's."""
    batches = [batch(dist.get_rank(), step) for step in range(3)]
    return torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def trainer(folder: str, callback: Any, epochs: int, **arguments: Any) -> Any:
    from lightning.pytorch import Trainer

    warnings.simplefilter("ignore")
    usual: dict[str, Any] = {"accelerator": "cpu", "devices": dist.get_world_size(), "strategy": "ddp"}
    usual |= {
        "max_epochs": epochs,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "use_distributed_sampler": False,
    }
    usual |= {"enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    return Trainer(default_root_dir=folder, **{"callbacks": [callback], **usual, **arguments})


def callback(method: str, **options: Any) -> Any:
    from gradwire.integrations.lightning import GradwireCallback

    return GradwireCallback(method, **options)


@launched()
def resumes(folder: str, method: str, options: dict[str, Any]) -> tuple[bytes, bytes]:
    """Two epochs, the second again from a checkpoint after the first."""
    first = callback(method, **options)
    net = module()
    run = trainer(folder, first, 1)
    run.fit(net, loader())
    assert first.attachment.stats().steps == 3
    assert run.callback_metrics["gradwire/recent/steps"] == 1
    assert run.callback_metrics["gradwire/ratio"] > 1
    run.save_checkpoint(f"{folder}/saved.ckpt")
    second = callback(method, **options)
    straight = trainer(folder, second, 2)
    net = module()
    straight.fit(net, loader())
    again = callback(method, **options)
    resumed = module()
    trainer(folder, again, 2).fit(resumed, loader(), ckpt_path=f"{folder}/saved.ckpt")
    assert again.attachment.stats().steps == 3
    for each in (first, second, again):
        each.attachment.close()
    return flat(net).numpy().tobytes(), flat(resumed).numpy().tobytes()


@pytest.mark.parametrize(("method", "options"), METHODS, ids=[name for name, _ in METHODS])
def test_a_run_that_goes_on_gives_the_same_bits(pool: Pool, tmp_path: Path, method: str, options: Any) -> None:
    results = pool.run(2, resumes, str(tmp_path), method, options)
    assert len({each for result in results for each in result}) == 1


@launched()
def saved_by_all(folder: str) -> Tensor:
    each = callback("topk", ratio=0.05)
    run = trainer(folder, each, 1)
    run.fit(module(), loader())
    run.save_checkpoint(f"{folder}/saved.ckpt")
    remembered = owed(each.attachment)
    each.attachment.close()
    return remembered


@launched()
def loaded_by_others(folder: str) -> Tensor:
    each = callback("topk", ratio=0.05)
    trainer(folder, each, 1).fit(module(), loader(), ckpt_path=f"{folder}/saved.ckpt")  # its epoch is over
    remembered = owed(each.attachment)
    each.attachment.close()
    return remembered


def test_another_number_of_workers_owes_as_much(pool: Pool, tmp_path: Path) -> None:
    before = torch.stack(pool.run(3, saved_by_all, str(tmp_path)))
    after = torch.stack(pool.run(2, loaded_by_others, str(tmp_path)))
    torch.testing.assert_close(after.mean(0), before.mean(0))


@launched()
def dense_or_not_at_all(folder: str, method: str | None) -> tuple[Tensor, int]:
    """Two micro-batches a step, and clipping."""
    each = callback(method) if method else None
    net = module()
    batches = [batch(dist.get_rank(), step) for step in range(6)]
    data = torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    arguments = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    trainer(folder, each, 2, callbacks=[each] if each else [], **arguments).fit(net, data)
    steps = each.attachment.stats().steps if each else 6
    if each:
        each.attachment.close()
    return flat(net), steps


def test_dense_is_what_lightning_does(pool: Pool, tmp_path: Path) -> None:
    (ours, steps), _ = pool.run(2, dense_or_not_at_all, str(tmp_path), "dense")
    (theirs, _), _ = pool.run(2, dense_or_not_at_all, str(tmp_path), None)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert steps == 6


@launched()
def fits_again(folder: str) -> None:
    each = callback("topk", ratio=0.05)
    net = module()
    trainer(folder, each, 1).fit(net, loader())
    remembered = owed(each.attachment)
    trainer(folder, each, 1, limit_train_batches=0).fit(net, loader())
    assert torch.equal(owed(each.attachment), remembered)
    (copied,) = copy.deepcopy([each])
    assert not copied.attachment.handles
    trainer(folder, copied, 1).fit(net, loader())
    assert not torch.equal(owed(copied.attachment), owed(each.attachment))
    copied.attachment.close()
    doubled = trainer(folder, each, 1)
    doubled.callbacks.append(callback("topk"))
    with pytest.raises(ConfigurationError, match=r"several GradwireCallbacks.*give one"):
        doubled.fit(net, loader())
    fabric = SimpleNamespace(strategy=SimpleNamespace(precision=None))
    with pytest.raises(ConfigurationError, match=r"SimpleNamespace makes a Linear.*choose strategy='ddp'"):
        callback("topk").on_after_setup(fabric, nn.Linear(2, 2))
    each.attachment.close()


def test_a_second_fit(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, fits_again, str(tmp_path))


@launched()
def scales_losses(folder: str) -> None:
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    each = callback("efsignsgd")
    trainer(folder, each, 1, plugins=[plugin]).fit(module(), loader())
    assert scaled_by(each.attachment, scaler)
    each.attachment.close()


def test_the_scaler_is_handed_on(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, scales_losses, str(tmp_path))


def fabric_of(callbacks: list[Any], **arguments: Any) -> Any:
    from lightning.fabric import Fabric

    usual = {"accelerator": "cpu", "devices": dist.get_world_size(), "strategy": "ddp"}
    fabric = Fabric(callbacks=callbacks, **{**usual, **arguments})
    fabric.launch()
    return fabric


def fabric_with(method: str | None, **arguments: Any) -> tuple[Any, Any, Any, Any]:
    """A callback, a Fabric that has it, and what that made of model and optimizer."""
    each = callback(method) if method else None
    fabric = fabric_of([each] if each else [], **arguments)
    net = network()
    return (each, fabric, *fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)))


def train_fabric(fabric: Any, model: Any, optimizer: Any) -> Tensor:
    """An epoch of whole steps, after two micro-batches that are one step, and clipped."""
    first, second, third = loader()
    for last, (inputs, labels) in ((False, first), (True, second), (True, third)):
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(nn.functional.cross_entropy(model(inputs), labels))
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


@launched()
def with_fabric(folder: str, method: str) -> tuple[bytes, bytes]:
    each, fabric, model, optimizer = fabric_with(method)
    train_fabric(fabric, model, optimizer)
    fabric.save(f"{folder}/fabric.ckpt", {"model": model, "optimizer": optimizer, "gradwire": each})
    straight = train_fabric(fabric, model, optimizer)
    assert each.attachment.figures()["gradwire/steps"] == 4
    each.attachment.close()
    each, fabric, model, optimizer = fabric_with(method)
    fabric.load(f"{folder}/fabric.ckpt", {"model": model, "optimizer": optimizer, "gradwire": each})
    resumed = train_fabric(fabric, model, optimizer)
    each.attachment.close()
    return straight.numpy().tobytes(), resumed.numpy().tobytes()


def test_fabric(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(2, with_fabric, str(tmp_path), "topk")
    assert len({each for result in results for each in result}) == 1


@launched()
def fabric_dense_or_not_at_all(method: str | None) -> Tensor:
    each, fabric, model, optimizer = fabric_with(method)
    weights = train_fabric(fabric, model, optimizer)
    if each:
        each.attachment.close()
    return weights


def test_dense_is_what_fabric_does(pool: Pool) -> None:
    (ours, _), (theirs, _) = (pool.run(2, fabric_dense_or_not_at_all, method) for method in ("dense", None))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@launched()
def fabric_saves_or_loads(folder: str, saves: bool) -> Tensor:
    each, fabric, model, optimizer = fabric_with("topk")
    state = {"model": model, "gradwire": each}
    if saves:
        train_fabric(fabric, model, optimizer)
        fabric.save(f"{folder}/fabric.ckpt", state)
    else:
        fabric.load(f"{folder}/fabric.ckpt", state)
    remembered = owed(each.attachment)
    each.attachment.close()
    return remembered


def test_another_number_of_fabrics_workers_owes_as_much(pool: Pool, tmp_path: Path) -> None:
    before = torch.stack(pool.run(3, fabric_saves_or_loads, str(tmp_path), True))
    after = torch.stack(pool.run(2, fabric_saves_or_loads, str(tmp_path), False))
    torch.testing.assert_close(after.mean(0), before.mean(0))


@launched()
def fabric_loads_before_it_wraps(folder: str) -> None:
    first, fabric, model, optimizer = fabric_with("topk")
    train_fabric(fabric, model, optimizer)
    fabric.save(f"{folder}/fabric.ckpt", {"gradwire": first})
    each = callback("topk")
    fabric = fabric_of([each])
    fabric.load(f"{folder}/fabric.ckpt", {"gradwire": each})
    fabric.setup(network())
    assert torch.equal(owed(each.attachment), owed(first.attachment))
    for other in (first, each):
        other.attachment.close()


def test_fabric_loads_before_it_wraps(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, fabric_loads_before_it_wraps, str(tmp_path))


@launched()
def loads_no_states(folder: str) -> None:
    run = trainer(folder, None, 1, callbacks=[])
    run.fit(module(), loader())
    run.save_checkpoint(f"{folder}/nothing.ckpt")
    first, second = callback("topk"), callback("topk")
    with warnings_of_gradwire() as told:
        trainer(folder, first, 1).fit(module(), loader(), ckpt_path=f"{folder}/nothing.ckpt")
        fabric = fabric_of([second])
        fabric.save(f"{folder}/fabric.ckpt", {"gradwire": second})
        fabric.setup(network())
        fabric.load(f"{folder}/fabric.ckpt", {"gradwire": second})
    assert sum("has no states of gradwire" in line for line in told) == 2 * (dist.get_rank() == 0)
    for each in (first, second):
        each.attachment.close()


@launched()
def forgets(folder: str) -> None:
    run, first, second = trainer(folder, None, 1, callbacks=[]), callback("topk"), callback("topk")
    run.fit(module(), loader())
    run.save_checkpoint(f"{folder}/nothing.ckpt")
    trainer(folder, first, 1).fit(module(), loader())
    fabric = fabric_of([second])
    fabric.save(f"{folder}/fabric.ckpt", {"gradwire": second})
    model = fabric.setup(network())
    fabric.backward(model(batch(dist.get_rank(), 0)[0]).sum())
    assert not any(begun(each.attachment) for each in (first, second))
    trainer(folder, first, 1, limit_train_batches=0).fit(module(), loader(), ckpt_path=f"{folder}/nothing.ckpt")
    fabric.load(f"{folder}/fabric.ckpt", {"gradwire": second})
    assert all(begun(each.attachment) for each in (first, second))


def test_a_checkpoint_without_states_has_all_forgotten(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, forgets, str(tmp_path))


def test_a_checkpoint_without_states_starts_empty(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, loads_no_states, str(tmp_path))


@launched()
def fabric_scales_losses() -> None:
    from lightning.fabric.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    each, *_ = fabric_with("efsignsgd", plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    assert scaled_by(each.attachment, scaler)
    each.attachment.close()


def test_fabrics_scaler_is_handed_on(pool: Pool) -> None:
    pool.run(2, fabric_scales_losses)


@launched()
def fabric_misuses() -> None:
    twice = [callback("topk"), callback("topk")]
    with pytest.raises(ConfigurationError, match=r"has the communication hook .* already; DDP takes one"):
        fabric_of(twice).setup(network())
    for each in twice:
        each.attachment.close()


def test_two_callbacks_of_fabric(pool: Pool) -> None:
    pool.run(2, fabric_misuses)


@launched()
def fabric_takes_local_steps() -> int:
    fabric, net = fabric_of([]), network()
    optimizer = fabric.setup_optimizers(torch.optim.SGD(net.parameters(), lr=0.1))
    assert "Fabric" in type(optimizer).__name__
    handle = gradwire.periodic(optimizer, every=2, method="qsgd", bits=8, parameters=net.named_parameters())
    for step in range(4):
        inputs, labels = batch(dist.get_rank(), step)
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same_everywhere(flat(net))
    handle.close()
    return handle.syncs


def test_local_steps_of_fabrics_optimizer(pool: Pool) -> None:
    assert pool.run(2, fabric_takes_local_steps) == [2, 2]


@launched()
def alone(folder: str) -> None:
    each = callback("topk")
    run = trainer(folder, each, 1, strategy="auto")
    run.fit(module(), loader())
    run.save_checkpoint(f"{folder}/alone.ckpt")
    assert each.attachment.stats().steps == 0
    assert each.state_dict() == {}
    with warnings_of_gradwire() as told:
        trainer(folder, each, 1, strategy="auto").fit(module(), loader(), ckpt_path=f"{folder}/saved.ckpt")
    assert any("a process that trains alone leaves them out" in line for line in told)


def test_a_process_alone_sends_nothing(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, saved_by_all, str(tmp_path))
    pool.run(1, alone, str(tmp_path))
