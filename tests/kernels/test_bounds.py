"""No kernel reads or writes outside of the gradient and of what is remembered: the pages beyond cannot be touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from catalogue import Case, cases
from gradwire import methods
from gradwire.engine.configuration import Configuration
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld
from gradwire.memory import Store
from gradwire.policy import DensePolicy
from guarded import guarded, release
from pool import Pool

SHAPES = [("conv", (5, 3, 3, 3)), ("linear", (33, 131)), ("odd", (1031,)), ("one", (1,)), ("long", (3, 4099))]
WORKERS = 3


def run_between_guards(chosen: Sequence[Case]) -> None:
    slots = flat_slots(SHAPES)
    numel = slots[-1].stop
    for case in chosen:
        for at_the_end in (True, False):

            def zeros(store: Store, size: int, dtype: torch.dtype, end: bool = at_the_end) -> torch.Tensor:
                assert dtype == torch.float32
                return guarded(max(size, 1), end)[:size]

            arguments: dict[str, Any] = {**case.options}
            configuration = Configuration.make(
                case.method,
                arguments,
                granularity=case.granularity,
                route=case.route,
                memory=case.memory,
                dense=DensePolicy(below=0, vectors=False),
            )
            with mock.patch.object(Store, "_zeros", zeros):
                world = LocalWorld(configuration, slots, WORKERS)
            for step in range(2):
                gradients = []
                for rank in range(WORKERS):
                    generator = torch.Generator().manual_seed(10 * step + rank)
                    gradients.append(guarded(numel, at_the_end).normal_(generator=generator))
                world.average(gradients)
                assert all(torch.equal(gradients[0], other) for other in gradients[1:]), str(case)
    del world, gradients
    release()


@pytest.mark.parametrize("name", methods.names())
def test_kernels_stay_inside(pool: Pool, name: str) -> None:
    chosen = [case for case in cases() if case.method == name and case.granularity != "bucket"]
    pool.run(1, run_between_guards, chosen)
