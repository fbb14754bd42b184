"""Transformers' Trainer: attached before ``train``, saved in ``checkpoint-N``, logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.errors import ConfigurationError
from launched import launched
from models import batch, flat, network
from pool import Pool

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


class Classifier(nn.Module):
    """As models of Transformers are called."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.network(inputs)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def samples() -> list[dict[str, Tensor]]:
    return [
        {"inputs": each, "labels": label} for step in range(16) for each, label in zip(*batch(0, step), strict=True)
    ]


def trainer_in(folder: str, method: str | None, options: dict[str, Any], **arguments: Any) -> tuple[Any, Any]:
    """A trainer of 6 steps that saves after the third, and its attachment."""
    from transformers import Trainer, TrainingArguments

    from gradwire.integrations.transformers import compress

    usual = {"save_steps": 3, "max_steps": 6, "logging_steps": 2, "learning_rate": 0.01, "report_to": "none"}
    usual |= {"per_device_train_batch_size": 16, "save_strategy": "steps", "disable_tqdm": True, "use_cpu": True}
    chosen = TrainingArguments(output_dir=folder, **{**usual, **arguments})
    trainer = Trainer(model=Classifier(), args=chosen, train_dataset=samples())
    return trainer, compress(trainer, method, **options) if method else None


@launched()
def resumes(folder: str, method: str, options: dict[str, Any]) -> tuple[bytes, ...]:
    """Six steps; the last three again from what was saved, found by itself and by name; figures are logged."""
    weights = []
    for resume in (False, f"{folder}/checkpoint-3", True):
        if resume is True:
            dist.barrier()
            if dist.get_rank() == 0:
                Path(folder, "checkpoint-6").rename(Path(folder, "later"))
            dist.barrier()
        trainer, attachment = trainer_in(folder, method, options)
        trainer.train(resume_from_checkpoint=resume)
        weights.append(flat(trainer.model).numpy().tobytes())
        logged = [each for each in trainer.state.log_history if "loss" in each]
        assert attachment.stats().steps == (3 if resume else 6)
        assert logged[-1]["gradwire/steps"] == attachment.stats().steps
        assert logged[-1]["gradwire/recent/steps"] == 2
        assert logged[-1]["gradwire/recent/ratio"] > 1
        attachment.close()
    return tuple(weights)


@pytest.mark.parametrize(("method", "options"), [("topk", {"ratio": 0.05}), ("acpsgd", {"rank": 4})])
def test_a_run_that_goes_on_gives_the_same_bits(pool: Pool, tmp_path: Path, method: str, options: Any) -> None:
    results = pool.run(2, resumes, str(tmp_path), method, options)
    assert len({each for result in results for each in result}) == 1


@launched()
def trains_twice(folder: str) -> None:
    trainer, attachment = trainer_in(folder, "efsignsgd", {}, save_strategy="no", gradient_accumulation_steps=2)
    reported: list[set[str]] = []

    from transformers import TrainerCallback

    class Reporting(TrainerCallback):
        def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
            reported.append({name for name in logs if name.startswith("gradwire/")})

    trainer.add_callback(Reporting())
    for times in (1, 2):
        trainer.train()
        assert [handle.stats().steps for handle in attachment.handles] == [6 * times]
    assert "gradwire/recent/wire_bytes" in reported[0]
    with pytest.raises(ConfigurationError, match=r"wrapped its model already; compress before the first train\(\)"):
        compress_again(trainer)
    attachment.close()

    trainer, attachment = trainer_in(folder, "efsignsgd", {}, save_strategy="no", max_steps=2)
    trainer.model_init = lambda trial=None: Classifier()
    for _ in range(2):  # a new model each time, and a method attached to it
        trainer.train()
        assert [handle.stats().steps for handle in attachment.handles] == [2]
    with pytest.raises(ConfigurationError, match="give a transformers"):
        compress_again(nn.Linear(2, 2))
    attachment.close()
    trainer, _ = trainer_in(folder, "efsignsgd", {})
    with pytest.raises(ConfigurationError, match="has a method of gradwire's already"):
        compress_again(trainer)


def compress_again(trainer: Any) -> None:
    from gradwire.integrations.transformers import compress

    compress(trainer, "topk")


def test_a_second_training(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, trains_twice, str(tmp_path))


@launched()
def dense_or_not_at_all(folder: str, method: str | None) -> Tensor:
    trainer, attachment = trainer_in(folder, method, {}, save_strategy="no", max_grad_norm=0.0)
    trainer.train()
    if attachment:
        attachment.close()
    return flat(trainer.model)


def test_dense_is_what_the_trainer_does(pool: Pool, tmp_path: Path) -> None:
    (ours, _), (theirs, _) = (pool.run(2, dense_or_not_at_all, str(tmp_path), method) for method in ("dense", None))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    pool.run(1, dense_or_not_at_all, str(tmp_path), "topk")
