"""Lightning: a fit after one that an exception ended, and after one of another module."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from launched import begun, launched, warnings_of_gradwire
from models import batch, flat, network
from pool import Pool

pytest.importorskip("lightning")
pytest.importorskip("accelerate")  # whose state launched() resets


class OutOfMemory(torch.autograd.Function):
    """What fails on its way back."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        raise RuntimeError("out of memory")


def module() -> Any:
    """A small classifier, whose backward pass fails between two buckets from its step ``fails`` on."""
    from lightning.pytorch import LightningModule

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.fails = network(), 2

        def training_step(self, samples: tuple[Tensor, Tensor], number: int) -> Tensor:
            inputs, labels = samples
            first, *others = self.network
            hidden: Tensor = first(inputs)
            for layer in others:
                hidden = layer(OutOfMemory.apply(hidden) if self.global_step >= self.fails else hidden)
            return nn.functional.cross_entropy(hidden, labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return Classifier()


def fit(folder: str, callback: Any, net: Any) -> None:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy

    warnings.simplefilter("ignore")
    options: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    options |= {"enable_checkpointing": False, "use_distributed_sampler": False, "accelerator": "cpu"}
    trainer = Trainer(
        default_root_dir=folder,
        devices=dist.get_world_size(),
        strategy=DDPStrategy(bucket_cap_mb=0.001),
        max_epochs=1,
        callbacks=[callback],
        **options,
    )
    batches: Any = [batch(dist.get_rank(), step) for step in range(4)]
    trainer.fit(net, torch.utils.data.DataLoader(batches, batch_size=None))


@launched()
def fits_after_a_failure(folder: str) -> tuple[bytes, list[str]]:
    from gradwire.integrations.lightning import GradwireCallback

    callback, net = GradwireCallback("topk", ratio=0.05), module()
    with pytest.raises(RuntimeError, match="out of memory"):
        fit(folder, callback, net)
    net.fails = 4
    with warnings_of_gradwire() as told:
        fit(folder, callback, net)
    assert callback.attachment.stats().steps == 4
    assert not begun(callback.attachment)
    callback.attachment.close()
    return flat(net).numpy().tobytes(), told


def test_a_fit_after_one_that_failed_within_a_step(pool: Pool, tmp_path: Path) -> None:
    (first, told), (second, untold) = pool.run(2, fits_after_a_failure, str(tmp_path))
    assert first == second
    assert told == ["an earlier fit ended within a step: what compression remembers starts empty"]
    assert untold == []


@launched()
def fits_another_module(folder: str) -> None:
    from gradwire.integrations.lightning import GradwireCallback

    weights, shared = [], GradwireCallback("topk", ratio=0.05)
    for callback in (shared, shared, GradwireCallback("topk", ratio=0.05)):
        net = module()
        net.fails = 4
        fit(folder, callback, net)
        assert callback.attachment.stats().steps == 4
        weights.append(flat(net))
        del net
    assert weights[0].equal(weights[1])
    assert weights[0].equal(weights[2])
    larger = module()
    larger.fails, larger.network[-1] = 4, nn.Linear(larger.network[-1].in_features, 30)
    fit(folder, shared, larger)
    assert shared.attachment.stats().steps == 4
    shared.attachment.close()
    callback.attachment.close()


def test_a_fit_of_another_module_starts_empty(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, fits_another_module, str(tmp_path))
