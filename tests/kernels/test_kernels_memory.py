import torch
from torch import Tensor

from gradwire.kernels import cpu, reference
from gradwire.layout import Block
from kernel_inputs import blocks, gradients, normal, same
from together import together


@blocks
@gradients
def test_accumulate_is_the_reference(block: Block, gradient: Tensor) -> None:
    left, right = normal(99), normal(99)
    assert cpu.accumulate(block, gradient, left, 0.9, 0.3) == reference.accumulate(block, gradient, right, 0.9, 0.3)
    assert same(left, right)


@together("kernels", [cpu, reference])
@blocks
def test_nothing_is_accumulated_where_a_flag_does_not_hold(block: Block, kernels: object) -> None:
    kept, before = normal(99), normal(99)
    assert not kernels.accumulate(block, normal(7), kept, 0.9, 0.3, when=torch.tensor(False))
    assert same(kept, before)
    twin = normal(99)
    assert kernels.accumulate(block, normal(7), kept, 0.9, 0.3, when=torch.tensor(True))
    kernels.accumulate(block, normal(7), twin, 0.9, 0.3)
    assert same(kept, twin)
