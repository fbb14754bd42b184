import torch

from codec_checks import check_compiled_once, decoded, encoded
from gradwire.codecs.quantize import Quantiser
from gradwire.kernels import codes
from gradwire.memory import NONE
from kernel_inputs import BLOCKS, BUFFER, KEY, block_of, covered, normal

CODEC = Quantiser(codes.Vote())


def test_sends_signs() -> None:
    block, gradient = BLOCKS["one bucket"], normal()
    sent = decoded(CODEC, block, encoded(CODEC, block, gradient, NONE)[None])
    assert torch.equal(sent[covered(block)], gradient.sign()[covered(block)])
    assert CODEC.payload_bytes(block_of([1_000_000])) * 8 / 1e6 <= 1.01


def test_ties_are_fair_and_the_same_however_the_block_is_cut() -> None:
    """The number of +1 among 9,000 fair coins lies within 5 standard deviations of the half."""
    zeros = torch.zeros(BUFFER)
    whole = block_of([9000])
    sent = decoded(CODEC, whole, encoded(CODEC, whole, zeros, NONE)[None])
    assert abs(sent[covered(whole)].sum()) <= 5 * 9000**0.5
    cut = block_of([9000], "block:100")
    assert torch.equal(sent, decoded(CODEC, cut, encoded(CODEC, cut, zeros, NONE)[None]))
    assert not torch.equal(sent, decoded(CODEC, whole, encoded(CODEC, whole, zeros, NONE, KEY + 1)[None]))
    for shard in whole.shards(3):
        part = decoded(CODEC, shard, encoded(CODEC, shard, zeros, NONE)[None])
        assert torch.equal(part[covered(shard)], sent[covered(shard)])


def test_the_vote_on_the_mean_of_votes_is_the_majority() -> None:
    block = block_of([9000])
    gradients = [normal(seed) for seed in range(3)]
    votes = torch.stack([encoded(CODEC, block, gradient, NONE) for gradient in gradients])
    mean = decoded(CODEC, block, votes, 1 / 3)
    majority = decoded(CODEC, block, encoded(CODEC, block, mean, NONE)[None])
    expected = torch.stack(gradients).sign().sum(0).sign()
    assert torch.equal(majority[covered(block)], expected[covered(block)])


def test_compiled_once() -> None:
    check_compiled_once("vote", "sign")
