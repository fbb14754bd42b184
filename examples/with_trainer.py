"""Transformers' Trainer with compressed averages.

    pip install 'gradwire[transformers]'
    torchrun --nproc-per-node 2 examples/with_trainer.py --folder results/trainer
    torchrun --nproc-per-node 2 examples/with_trainer.py --folder results/trainer --resume --steps 400

A GPT-2 learns from nothing to go on with the sources of Python's standard library, byte by byte.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import gradwire.integrations.transformers


def pieces(length: int, megabytes: float) -> list[dict[str, torch.Tensor]]:
    """Text as bytes, cut into pieces; every byte is a token."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(path.read_bytes() for path in paths)[: int(megabytes * 1e6)]
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [{"input_ids": each, "labels": each} for each in tokens.split(length) if len(each) == length]


def main() -> None:
    """Trains, and prints what was sent."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--megabytes", type=float, default=4.0, help="of text")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint in the folder")
    choices = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=128,
        n_embd=choices.width,
        n_layer=choices.layers,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    arguments = TrainingArguments(
        output_dir=choices.folder,
        max_steps=choices.steps,
        save_steps=choices.save_every,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        logging_steps=10,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=pieces(128, choices.megabytes))
    attachment = gradwire.integrations.transformers.compress(trainer, "topk", ratio=0.01)
    trainer.train(resume_from_checkpoint=choices.resume)
    if trainer.is_world_process_zero():
        losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last: {attachment.stats()}")
    attachment.close()


if __name__ == "__main__":
    main()
