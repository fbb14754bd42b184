"""Real gradients to try methods on: those of the demo's CNN or of a GRU, some steps into their training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from gradwire.layout import Float64Array, Slot, flat_slots
from gradwire.policy import DensePolicy
from gradwire_bench.data import DataSource
from gradwire_bench.tasks import Share
from gradwire_bench.workloads import IMAGE, Workload

BATCH = 32


@dataclass(frozen=True)
class Recording:
    """Gradients of one training at one time.

    Attributes:
        name: Of what, and when.
        slots: Matrices and convolutions, one after another.
        values: ``float32``, all of them.
        others: The same of other batches.
    """

    name: str
    slots: tuple[Slot, ...]
    values: Tensor
    others: tuple[Tensor, ...]

    @classmethod
    def of(cls, name: str, gradients: Sequence[Mapping[str, Tensor]]) -> Recording:
        """What the default policy compresses of several batches' gradients; the first is the one that counts."""
        shapes = [(key, tuple(each.shape)) for key, each in gradients[0].items()]
        slots = flat_slots([(key, shape) for key, shape in shapes if not DensePolicy().keeps_dense(shape)])
        values, *others = [torch.cat([each[slot.name].flatten() for slot in slots]) for each in gradients]
        return cls(name, slots, values, tuple(others))

    def layers(self) -> list[Float64Array]:
        """The values of each parameter."""
        return [self.values[slot.offset : slot.stop].double().numpy() for slot in self.slots]


def real_gradients(
    source: DataSource, workers: int, steps: int = 30, seed: int = 0, workload: Workload = IMAGE
) -> list[dict[str, Tensor]]:
    """The gradients by parameter name that each of ``workers`` would have to average after ``steps`` dense steps.

    Args:
        source: The data.
        workers: Number of gradients, each of a batch of its own.
        steps: Steps of plain SGD before, at half of the workload's learning rate.
        seed: Seed of the model's start and of the order of the samples.
        workload: What is trained.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = workload.model(source)
    batches = workload.task(source, Share(BATCH, seed)).batches()
    optimizer = torch.optim.SGD(net.parameters(), lr=workload.learning_rate / 2)
    for inputs, labels in islice(batches, steps):
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(net(inputs), labels))
        optimizer.step()
    found = []
    for inputs, labels in islice(batches, workers):
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(net(inputs), labels))
        found.append({name: each.grad for name, each in net.named_parameters() if each.grad is not None})
    return found
