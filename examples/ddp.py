"""DistributedDataParallel with compressed averages: one line more than without.

    torchrun --nproc-per-node 2 examples/ddp.py --method acpsgd

Every ten steps it says what was sent in them.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire


def main() -> None:
    """Fits a small network to a fixed function; rank 0 says how it went."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="acpsgd", help="a name of gradwire methods")
    parser.add_argument("--steps", type=int, default=200)
    choices = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 16)))
    handle = gradwire.compress(model, choices.method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    truth = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)) / 8
    noise = torch.Generator().manual_seed(2 + dist.get_rank())
    before = handle.stats()
    for step in range(choices.steps):
        inputs = torch.randn(64, 64, generator=noise)
        loss = nn.functional.mse_loss(model(inputs), torch.tanh(inputs @ truth))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            now = handle.stats()
            print(f"step {step + 1} loss {loss.item():.4f}: {now.since(before)}", flush=True)
            before = now
    if dist.get_rank() == 0:
        print(f"in all: {handle.stats()}")
    handle.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
