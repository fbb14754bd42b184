from torch import Tensor

from gradwire.kernels import cpu, reference
from gradwire.layout import Block
from kernel_inputs import blocks, gradients, normal, same


@blocks
@gradients
def test_accumulate_is_the_reference(block: Block, gradient: Tensor) -> None:
    left, right = normal(99), normal(99)
    assert cpu.accumulate(block, gradient, left, 0.9, 0.3) == reference.accumulate(block, gradient, right, 0.9, 0.3)
    assert same(left, right)
