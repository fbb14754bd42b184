"""DiLoCo between sites: compressed gradients within a site in every step, parameters between sites now and then.

    torchrun --nproc-per-node 4 examples/diloco.py --sites 2 --every 8
    gradwire lab --sites 2 --between 100mbit --within 1gbit -- python examples/diloco.py --sites 2 --every 8

The second command makes such sites on one machine, and counts what each sends to the other. Workers of a site are
neighbours in rank and have the faster network. Between sites 4 bits a value go every so many steps, and an outer
Nesterov optimizer takes their average for a gradient (Douillard et al. 2023, arXiv:2311.08105). With as many sites as
workers, every worker takes local steps, as in the paper.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import gradwire


def nesterov(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The outer optimizer, with the paper's settings."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def main() -> None:
    """Fits a small network to a fixed function; rank 0 says what went within sites and between them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--every", type=int, default=8, help="steps between two averages over sites")
    parser.add_argument("--steps", type=int, default=200)
    choices = parser.parse_args()

    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (choices.sites, workers // choices.sites), mesh_dim_names=("sites", "site"))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 16))
    model = DistributedDataParallel(net, process_group=mesh["site"].get_group())
    within = gradwire.compress(model, "efsignsgd")
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    between = gradwire.periodic(
        optimizer,
        every=choices.every,
        method="qsgd",
        bits=4,
        outer=nesterov,
        parameters=net.named_parameters(),
        process_group=mesh["sites"],
    )

    truth = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)) / 8
    noise = torch.Generator().manual_seed(2 + rank)
    for step in range(choices.steps):
        inputs = torch.randn(64, 64, generator=noise)
        loss = nn.functional.mse_loss(model(inputs), torch.tanh(inputs @ truth))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % choices.every == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    between.synchronize()
    if rank == 0:
        print(f"within a site: {within.stats()}\nbetween sites: {between.stats()}")
    between.close()
    within.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
