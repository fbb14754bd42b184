"""Transformers' Trainer: attached before ``train``, saved in ``checkpoint-N``, logged."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.errors import ConfigurationError
from launched import launched, owed, scaled_by, warnings_of_gradwire
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
def goes_on_from_a_signal(folder: str) -> bool:
    """Six steps, and six that are told to end after the third and go on from what is saved then."""
    from transformers import TrainerCallback

    class Ended(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:  # as three seconds after a SIGTERM
                for each in kwargs["ended"].callback_handler.callbacks:
                    if manager := getattr(each, "jit_manager", None):
                        manager.is_checkpoint_requested = True

    weights = []
    for arguments, resume in (({}, None), ({"enable_jit_checkpoint": True}, None), ({}, f"{folder}/checkpoint-3")):
        trainer, attachment = trainer_in(folder, "topk", {"ratio": 0.05}, save_strategy="no", **arguments)
        if arguments:
            ending = Ended()
            ending.on_step_end = partial(ending.on_step_end, ended=trainer)
            trainer.add_callback(ending)
        trainer.train(resume_from_checkpoint=resume)
        weights.append(flat(trainer.model))
        attachment.close()
    return not weights[0].equal(weights[1]) and weights[0].equal(weights[2])


def test_a_checkpoint_at_a_signal_has_the_states(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, goes_on_from_a_signal, str(tmp_path)) == [True, True]


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


@launched()
def finds_a_batch_size(folder: str) -> bytes:
    """The first size that is tried fails when a backward pass has been averaged."""
    trainer, attachment = trainer_in(folder, "topk", {"ratio": 0.05}, save_strategy="no", auto_find_batch_size=True)
    step, sizes = trainer.training_step, []

    def fails_at_first(*args: Any) -> Tensor:
        loss: Tensor = step(*args)
        sizes.append(trainer._train_batch_size)
        if trainer._train_batch_size == 16:
            raise RuntimeError("CUDA out of memory.")
        return loss

    trainer.training_step = fails_at_first
    trainer.train()
    assert sizes[0] == 16 > sizes[1]
    assert attachment.stats().steps == 6
    attachment.close()
    return flat(trainer.model).numpy().tobytes()


def test_a_batch_size_is_found(pool: Pool, tmp_path: Path) -> None:
    assert len(set(pool.run(2, finds_a_batch_size, str(tmp_path)))) == 1


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


@launched()
def trains_with_others_arguments(folder: str) -> None:
    from accelerate import DistributedDataParallelKwargs

    from gradwire.integrations.transformers import compress

    trainer, _ = trainer_in(folder, None, {}, save_strategy="no", max_steps=2)
    wrap = trainer._wrap_model

    def wrap_model(*args: Any, **kwargs: Any) -> Any:
        trainer.accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
        return wrap(*args, **kwargs)

    trainer._wrap_model = wrap_model
    attachment = compress(trainer, "topk", ratio=0.05)
    trainer.train()
    assert trainer.model_wrapped.find_unused_parameters
    assert attachment.stats().steps == 2
    attachment.close()


def test_arguments_for_ddp_that_the_trainer_sets_when_it_begins(pool: Pool, tmp_path: Path) -> None:
    """As trainers of Transformers before 5.3 do."""
    pool.run(2, trains_with_others_arguments, str(tmp_path))


@launched()
def saved_or_loaded(folder: str, resume: str | bool) -> Tensor:
    """What is owed after three steps, or where training goes on from them."""
    from transformers import TrainerCallback

    trainer, attachment = trainer_in(folder, "topk", {"ratio": 0.05}, max_steps=3 if resume is False else 4)
    begun: list[Tensor] = []

    class Looking(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            begun.append(owed(attachment))

    if resume is not False:
        trainer.add_callback(Looking())
    trainer.train(resume_from_checkpoint=resume)
    remembered = begun[0] if begun else owed(attachment)
    attachment.close()
    return remembered


def test_another_number_of_workers_owes_as_much(pool: Pool, tmp_path: Path) -> None:
    before = torch.stack(pool.run(3, saved_or_loaded, str(tmp_path), False))
    after = torch.stack(pool.run(2, saved_or_loaded, str(tmp_path), f"{tmp_path}/checkpoint-3"))
    assert after.any()
    torch.testing.assert_close(after.mean(0), before.mean(0))


@launched()
def starts_empty(folder: str) -> list[str]:
    trainer, _ = trainer_in(folder, None, {}, max_steps=3)
    trainer.train()
    trainer, attachment = trainer_in(folder, "topk", {"ratio": 0.05})
    with warnings_of_gradwire() as lines:
        trainer.train(resume_from_checkpoint=True)
    assert attachment.stats().steps == 3
    attachment.close()
    return lines


def test_a_checkpoint_without_states_starts_empty(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, starts_empty, str(tmp_path))
    assert first == [f"{tmp_path}/checkpoint-3 has no states of gradwire: what compression remembers starts empty"]
    assert second == []


@launched()
def scales_losses(folder: str) -> None:
    trainer, attachment = trainer_in(folder, "efsignsgd", {}, max_steps=2, save_strategy="no")
    trainer.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=8.0)  # which it makes on GPUs only
    trainer.train()
    assert scaled_by(attachment, scaler)
    attachment.close()


def test_the_scaler_is_handed_on(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, scales_losses, str(tmp_path))


@launched()
def evaluates_first(folder: str) -> None:
    trainer, attachment = trainer_in(folder, "topk", {"ratio": 0.05}, save_strategy="no")
    trainer.eval_dataset = samples()
    trainer.evaluate()
    with pytest.raises(ConfigurationError, match=r"not wrapped in DDP, as after evaluate\(\) .*; evaluate after"):
        trainer.train()
    attachment.close()
    trainer, attachment = trainer_in(folder, "topk", {"ratio": 0.05}, save_strategy="no", max_steps=2)
    trainer.eval_dataset = samples()
    trainer.train()
    trainer.evaluate()
    trainer.train()
    assert attachment.stats().steps == 4
    attachment.close()


def test_evaluating_before_training(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, evaluates_first, str(tmp_path))
