"""Accelerate with compressed averages.

    pip install 'gradwire[accelerate]'
    torchrun --nproc-per-node 2 examples/with_accelerate.py --folder results/accelerate

Started again with the same folder it goes on where it ended.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

import gradwire.integrations.accelerate


def main() -> None:
    """Fits a small network to a fixed function, two micro-batches a step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    choices = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    attachment = gradwire.integrations.accelerate.compress(accelerator, "acpsgd", rank=4)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 16))
    inputs = torch.randn(4096, 64)
    targets = torch.tanh(inputs @ torch.randn(64, 16) / 8)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=32)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
    if choices.folder.exists():
        accelerator.load_state(str(choices.folder))

    done = 0
    while done < choices.steps:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            done += accelerator.sync_gradients
            if done == choices.steps:
                break
        accelerator.print(f"loss {loss.item():.4f}: {attachment.stats()}")
    accelerator.save_state(str(choices.folder))
    attachment.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
