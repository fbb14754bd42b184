"""Ray Train with compressed averages; started again with the same folder it goes on from its last checkpoint.

    pip install 'gradwire[ray]'
    python examples/with_ray.py --folder results/ray

A restart gives the same bits as a run that was not stopped, also when Ray itself starts the workers anew.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from torch import nn

import gradwire.integrations.ray


def train(config: dict[str, Any]) -> None:
    """What every worker does: fits a small network to a fixed function."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = ray.train.get_context().get_world_rank()
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    attachment = gradwire.integrations.ray.compress(model, "topk", ratio=0.05)

    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "model.pt"), weights_only=True)
        first = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    truth = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    for step in range(first, config["steps"]):
        inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = nn.functional.mse_loss(model(inputs), torch.tanh(inputs @ truth))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % config["every"] == 0:
            with tempfile.TemporaryDirectory() as folder:
                if rank == 0:
                    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                    torch.save(parts, Path(folder, "model.pt"))
                attachment.save(folder)
                metrics = {"step": step + 1, "loss": loss.item(), **attachment.figures()}
                ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
    attachment.close()


def run(folder: str, steps: int, every: int, workers: int) -> ray.train.Result:
    """Starts the workers, or has them go on where a run in this folder ended."""
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"steps": steps, "every": every},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(name="gradwire", storage_path=str(Path(folder).absolute())),
    )
    return trainer.fit()


def main() -> None:
    """Trains, and prints what the last report said."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--workers", type=int, default=2)
    print(run(**vars(parser.parse_args())).metrics)


if __name__ == "__main__":
    main()
