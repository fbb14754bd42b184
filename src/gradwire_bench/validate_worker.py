"""One rank of ``gradwire bench validate``: probes the group, then times contenders as ``gradwire bench sync`` does."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.cost import probe
from gradwire.wire import ProcessGroupTransport
from gradwire_bench import shapes
from gradwire_bench.sync_worker import Race
from gradwire_bench.worker import agree, emit, mean_over_ranks, process_group

SIZES = (1 << 10, 1 << 15, 1 << 18, 1 << 20, 1 << 22)


def main() -> None:
    """Runs the job given as JSON on the command line."""
    job = json.loads(sys.argv[1])
    with process_group(timeout=2 * job["timeout"]) as (rank, _):
        group = dist.new_group()
        network = probe.measured(ProcessGroupTransport(group), torch.device("cpu"), SIZES)
        dist.barrier()
        share = -agree(-probe.core_share())[0]  # the least of all ranks', for which everybody waits
        parameters = shapes.get(job["shapes"])
        numel = shapes.numel(parameters)
        model = shapes.ShapedModel(parameters, torch.zeros(numel), shapes.Noise(numel, seed=rank))
        wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True, init_sync=False)
        taken = probe.arrivals(wrapped, _loss, clock=time.thread_time)
        works = [mean_over_ranks(each) for each in taken[1:]]
        if rank == 0:
            emit("probe", row=-1, network=asdict(network), core_share=share, backward=works)
        Race(job, rank).run()


def _loss(model: nn.Module) -> Tensor:
    loss: Tensor = model(0)
    return loss


if __name__ == "__main__":
    main()
