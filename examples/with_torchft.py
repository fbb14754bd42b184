"""torchft with compressed averages: a replica that dies costs a step, and one that comes takes over the model.

    pip install 'gradwire[torchft]'
    torchft_lighthouse --min_replicas 2 --join_timeout_ms 1000
    TORCHFT_LIGHTHOUSE=http://localhost:29510 torchrun --standalone examples/with_torchft.py --replica 0

The third line is one replica group's; start another with ``--replica 1`` and so on, at any time, and kill them at will.
"""

import argparse
import os
import time

import torch
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo

import gradwire.integrations.torchft


def main() -> None:
    """Fits a small network to a fixed function; prints a line a step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--least", type=int, default=2, help="replicas without which no step is taken")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds a step waits, to leave time to kill")
    choices = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 16))
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=choices.least,
        replica_id=f"replica_{choices.replica}",
    )
    averages = gradwire.integrations.torchft.compress(manager, "topk", ratio=0.05, parameters=model)
    optimizer = Optimizer(manager, inner)

    truth = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    while (step := manager.current_step()) < choices.steps:
        seed = 1000 * step + choices.replica
        inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()  # looks who is there
        loss = nn.functional.mse_loss(model(inputs), torch.tanh(inputs @ truth))
        loss.backward()
        averages.synchronize()
        optimizer.step()  # unless something failed
        taken = "taken" if manager.current_step() > step else "not taken"
        print(f"step {step} {taken} by {manager.num_participants()} loss {loss.item():.4f}", flush=True)
        time.sleep(choices.pause)
    weights = torch.cat([each.detach().view(-1) for each in model.parameters()])
    print(f"weights {weights.double().norm().item():.15g}, {averages.stats()}", flush=True)
    averages.close()
    manager.shutdown(wait=False)
    os._exit(0)  # torchft's threads wait for nobody


if __name__ == "__main__":
    main()
