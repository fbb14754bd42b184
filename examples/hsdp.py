"""Two replicas of two shards: FSDP2 inside a machine, compressed averages between machines.

    torchrun --nproc-per-node 4 examples/hsdp.py --folder checkpoints

Started again it goes on from its checkpoint, as if it had not stopped.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire


def build() -> nn.Module:
    """A small network, the same on every rank, in several parameter groups."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)), nn.Linear(64, 8))


def batches(first: int, last: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What this rank trains on: a fixed function of noise."""
    truth = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    for step in range(first, last):
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * dist.get_rank() + step))
        yield inputs, torch.tanh(inputs @ truth)


def train(folder: Path, steps: int) -> tuple[float, gradwire.Stats]:
    """Trains from the newest checkpoint on, and leaves another; the last loss of this rank, and counters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = build()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    handle = gradwire.compress(model, "acpsgd", rank=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    first, loss = torch.zeros((), dtype=torch.int64), torch.zeros(())
    if folder.exists():
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "gradwire": gradwire.PerRank(handle), "step": first}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    for inputs, wanted in batches(int(first), steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), wanted)
        loss.backward()  # the gradients are averages over all four ranks when this returns
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    first.fill_(steps)
    state = {"model": weights, "optimizer": moments, "gradwire": gradwire.PerRank(handle), "step": first}
    dcp.save(state, checkpoint_id=folder)
    stats = handle.stats()
    handle.close()
    return loss.item(), stats


def main() -> None:
    """Prints the last loss and how much less was sent between replicas."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    choices = parser.parse_args()
    dist.init_process_group("gloo")
    loss, stats = train(choices.folder, choices.steps)
    if dist.get_rank() == 0:
        print(f"step {choices.steps}: loss {loss:.4f}; {stats.steps} steps, {stats.ratio:.1f} times fewer bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
