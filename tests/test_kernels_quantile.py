import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codec_checks import (
    cases,
    check_any_bytes,
    check_compiled_once,
    check_is_the_reference,
    check_residual_is_what_was_not_sent,
    decoded,
    encoded,
)
from gradwire.errors import ConfigurationError
from gradwire.kernels import cpu
from gradwire.layout import Block
from gradwire.memory import NONE
from gradwire.quantize import Quantile
from test_kernels import BLOCKS, BUFFER, block_of, blocks, covered, gradients, memories, normal

codecs = pytest.mark.parametrize("codec", [Quantile(4), Quantile(16), Quantile(256)], ids=str)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cpu.warm_up()


@blocks
@gradients
@memories
def test_is_the_reference(block: Block, gradient: Tensor, memory: tuple[float, float] | None) -> None:
    check_is_the_reference(Quantile(16), block, gradient, memory)


@codecs
@pytest.mark.parametrize("name", ["odd layers", "one bucket", "packed shard"])
def test_any_number_of_buckets_is_the_reference(codec: Quantile, name: str) -> None:
    check_is_the_reference(codec, BLOCKS[name], normal(), (0.9, 0.3))


@blocks
@gradients
def test_residual_is_what_was_not_sent(block: Block, gradient: Tensor) -> None:
    check_residual_is_what_was_not_sent(Quantile(16), block, gradient)


@settings(max_examples=40, deadline=None)
@given(case=cases(), content=st.binary(min_size=1, max_size=60), buckets=st.sampled_from([4, 16]))
def test_any_values_and_any_bytes(case: tuple, content: bytes, buckets: int) -> None:
    check_is_the_reference(Quantile(buckets), *case)
    check_any_bytes(Quantile(buckets), case[0], content)


def test_few_values_are_sent_as_they_are() -> None:
    block, gradient = block_of([256]), normal()
    assert torch.equal(
        decoded(Quantile(), block, encoded(Quantile(), block, gradient, NONE)[None])[2:258], gradient[2:258]
    )


def test_buckets_hold_equally_many_and_send_their_mean() -> None:
    block, gradient = block_of([8]), torch.zeros(BUFFER)
    gradient[2:10] = torch.tensor([5.0, -1.0, 0.0, 9.0, -3.0, 0.0, 7.0, 1.0])
    sent = decoded(Quantile(4), block, encoded(Quantile(4), block, gradient, NONE)[None])
    assert sent[2:10].tolist() == [3.0, -2.0, 0.0, 8.0, -2.0, 0.0, 8.0, 3.0]


@pytest.mark.parametrize("seed", range(3))
def test_many_values_are_sorted_as_torch_sorts_them(seed: int) -> None:
    block, gradient = block_of([11_000]), normal(seed) * 10.0 ** torch.arange(BUFFER).remainder(60).sub(30)
    gradient[::7] = 0.0
    gradient[::11] = -0.0
    check_is_the_reference(Quantile(256), block, gradient, None)


@codecs
def test_contracts_by_what_it_sends(codec: Quantile) -> None:
    block, gradient = block_of([9000]), normal()
    inside = covered(block)
    sent = decoded(codec, block, encoded(codec, block, gradient, NONE)[None])[inside].double()
    t = gradient[inside].double()
    assert (t - sent).square().sum() <= t.square().sum() - sent.square().sum() + 1e-3


@pytest.mark.parametrize("buckets", [0, 2, 32, 512])
def test_buckets_out_of_range(buckets: int) -> None:
    with pytest.raises(ConfigurationError, match="buckets"):
        Quantile(buckets)


def test_compiled_once() -> None:
    check_compiled_once("quantile", "_packed")
