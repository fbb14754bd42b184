"""One rank of ``gradwire bench validate``: measures its group as advice does, then times contenders."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.cost import group, measure, probe
from gradwire.cost.workload import Workload
from gradwire.wire import ProcessGroupTransport
from gradwire_bench import shapes
from gradwire_bench.contenders import DDP, Contender
from gradwire_bench.models import GPT2
from gradwire_bench.sync_worker import Race
from gradwire_bench.worker import emit, process_group

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 21, 1 << 23)
CPU = torch.device("cpu")


class Computed(nn.Module):
    """A small GPT-2 of 3.7 M parameters, whose backward pass is real.

    Args:
        rank: This worker, who has tokens of its own.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = GPT2(vocabulary=2048, context=32, width=256, layers=4)
        self._tokens = torch.randint(2048, (64, 33), generator=torch.Generator().manual_seed(rank))

    def forward(self, step: int) -> Tensor:
        """The loss of two sequences of 32 tokens."""
        start = 2 * step % 64
        tokens = self._tokens[start : start + 2]
        loss: Tensor = self.net(tokens[:, :-1], tokens[:, 1:])
        return loss


class Shaped(shapes.ShapedModel):
    """The same parameters, with prepared gradients and without computation: averages alone."""

    def __init__(self, rank: int) -> None:
        parameters = [(name, tuple(each.shape)) for name, each in Computed(rank).named_parameters()]
        numel = shapes.numel(parameters)
        super().__init__(parameters, torch.zeros(numel), shapes.Noise(numel, seed=rank))


MODELS = {"sync": Shaped, "backward": Computed}


def main() -> None:
    """Runs the job given as JSON on the command line."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    with process_group(timeout=2 * job["timeout"]) as (rank, _):
        transport = ProcessGroupTransport(dist.new_group())
        parameters = [(name, tuple(each.shape)) for name, each in Computed(rank).named_parameters()]
        racers = [Contender.parse(text) for text in job["methods"]]
        tried = [each.configuration() for each in (*racers, Contender("dense")) if each.name != DDP]
        profile, _ = measure.slowest(measure.here(tried, parameters, CPU, shapes.numel(parameters)), transport, CPU)
        network = probe.measured(transport, CPU, SIZES)
        seen = {"network": asdict(network), "profile": asdict(profile), "cores": group.cores(transport, CPU)}
        for mode in job["modes"]:
            wrapped = DistributedDataParallel(MODELS[mode](rank))
            workload = probe.arrivals(wrapped, _loss, transport, clock=time.thread_time)
            if rank == 0:
                emit("probe", row=-1, mode=mode, workload=as_plain(workload), **seen)
            Race({**job, "mode": mode}, rank, partial(MODELS[mode], rank)).run()


def as_plain(workload: Workload) -> dict[str, Any]:
    """What a worker computes, for JSON."""
    return asdict(workload) | {"dtype": str(workload.dtype)}


def _loss(model: nn.Module) -> Tensor:
    loss: Tensor = model(0)
    return loss


if __name__ == "__main__":
    main()
