"""What ``gradwire bench gpu`` compares bit by bit on a GPU, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from interpreted import BLOCKS, of_all_kinds

from gradwire.kernels import dispatch, gpu
from gradwire_bench.gpu_operations import FAMILIES, Operation
from gradwire_bench.gpu_part import _agree


@pytest.mark.parametrize("family", FAMILIES)
def test_has_the_bits_of_the_reference(family: str) -> None:
    block = BLOCKS["layers of any kind"]
    values = of_all_kinds(block)[: block.slots[-1].stop]
    own, reference = (FAMILIES[family](block, values) for _ in range(2))
    for first, second in zip(own, reference, strict=True):
        assert _agree(by(vars(gpu), first), by({}, second)), first.name


def by(kernels: Mapping[str, Any], operation: Operation) -> Operation:
    def run() -> None:
        with mock.patch.object(dispatch, "overrides", return_value=kernels):
            operation.run()

    return replace(operation, run=run)


@pytest.fixture(autouse=True)
def quietly() -> Any:
    with np.errstate(all="ignore"):
        yield
