"""Training that outlives its workers: who dies is left out, and nothing that compression still owes is lost.

    torchrun --nnodes 1:4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --max-restarts 3 \
        examples/elastic.py --folder checkpoints

is started on each of up to four machines, with a folder they share. Whenever one of them leaves or comes, torchrun
starts the workers of the others anew; they read the newest checkpoint that is whole, and go on as fewer or as more.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, handle: gradwire.Handle) -> None:
    """Each rank writes its own part; a part that is under its final name is whole."""
    part = {"step": step, "handle": handle.state_dict()}
    if dist.get_rank() == 0:
        part |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    path = folder / f"step-{step}-rank-{dist.get_rank()}-of-{dist.get_world_size()}.pt"
    torch.save(part, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def newest(folder: Path) -> list[Path]:
    """The parts of the newest checkpoint of which there are all, in order of rank."""
    for first in sorted(folder.glob("step-*-rank-0-of-*.pt"), key=lambda path: -int(path.name.split("-")[1])):
        parts = [Path(str(first).replace("rank-0", f"rank-{rank}")) for rank in range(int(first.stem.split("-")[-1]))]
        if all(part.exists() for part in parts):
            return parts
    return []


def main() -> None:
    """Fits a small network to a fixed function; prints a line a step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds a step waits, to leave time to kill")
    choices = parser.parse_args()
    choices.folder.mkdir(parents=True, exist_ok=True)

    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    handle = gradwire.compress(model, "efsignsgd")

    first = 0
    if paths := newest(choices.folder):
        parts = [torch.load(path, weights_only=True) for path in paths]
        first = parts[0]["step"]
        model.load_state_dict(parts[0]["model"])
        optimizer.load_state_dict(parts[0]["optimizer"])
        states = gradwire.redistribute([part["handle"] for part in parts], workers)
        handle.load_state_dict(states[rank])
        if rank == 0:
            print(f"{workers} workers go on from step {first} of {len(parts)} workers", flush=True)
        for path in choices.folder.glob("step-*") if rank == 0 else ():
            if int(path.name.split("-")[1]) > first:
                path.unlink()  # what was not saved on all ranks must not mix with what comes
    dist.barrier()  # nobody writes before everybody has read

    truth = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    for step in range(first, choices.steps):
        inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = nn.functional.mse_loss(model(inputs), torch.tanh(inputs @ truth))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % choices.every == 0:
            save(choices.folder, step + 1, model, optimizer, handle)
        if rank == 0:
            print(f"step {step} workers {workers} loss {loss.item():.4f}", flush=True)
        time.sleep(choices.pause)
    handle.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
