"""Lightning with compressed averages.

    pip install 'gradwire[lightning]'
    torchrun --nproc-per-node 2 examples/with_lightning.py --folder results/lightning

Started again with the same folder it goes on where it ended.
"""

import argparse
import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from gradwire.integrations.lightning import GradwireCallback


class Fit(LightningModule):
    """Fits a small network to a fixed function."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 16))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """The mean squared error."""
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.network(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    """Trains; figures are in the folder's metrics.csv."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    choices = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(4096, 64)
    data = torch.utils.data.TensorDataset(inputs, torch.tanh(inputs @ torch.randn(64, 16) / 8))
    callback = GradwireCallback("acpsgd", rank=4)
    trainer = Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy="ddp",
        max_steps=choices.steps,
        log_every_n_steps=10,
        callbacks=[callback],
        logger=CSVLogger(choices.folder),
        enable_progress_bar=False,
    )
    last = choices.folder / "last.ckpt"
    loader = torch.utils.data.DataLoader(data, batch_size=32)
    trainer.fit(Fit(), loader, ckpt_path=str(last) if last.exists() else None)
    trainer.save_checkpoint(last)
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.4f}: {callback.attachment.stats()}")
    callback.attachment.close()


if __name__ == "__main__":
    main()
