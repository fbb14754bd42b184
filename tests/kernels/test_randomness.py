import math

import numpy as np
import torch

from gradwire.kernels import Compensated, cpu, payload_bytes
from gradwire.kernels.codes import QSGD
from gradwire.layout import Slot
from gradwire.randomness import SHARED, hash32, key_of, mix64, run_keys
from kernel_inputs import BLOCKS, KEY, counts_of, normal


def test_keys_differ_and_repeat() -> None:
    keys = {key_of(seed, step, rank) for seed in range(8) for step in range(8) for rank in range(SHARED, 7)}
    assert len(keys) == 8 * 8 * 8
    assert all(0 <= key < 2**64 for key in keys)
    assert key_of(3, 4, 5) == key_of(3, 4, 5)
    assert key_of(-1, 2**63, SHARED) != key_of(-1, 2**63, 0)
    streams = np.array([Slot("a", (), 0).stream, 2**64 - 1], dtype=np.uint64)
    assert run_keys(KEY, streams).tolist() == [mix64(KEY ^ stream) for stream in streams.tolist()]


def test_hash_changes_half_the_bits() -> None:
    """Another counter or key changes each output bit in half of all cases, within 5 standard errors (plus 1 %)."""
    counters = torch.arange(20_000)
    bits = hash32(KEY, counters)
    others = [hash32(KEY, counters ^ 1 << bit) for bit in range(32)]
    others += [hash32(key_of(7, 11 + step, 3), counters) for step in range(1, 33)]
    for other in others:
        shares = (((bits ^ other)[:, None] >> torch.arange(32)) & 1).double().mean(0)
        assert (shares - 0.5).abs().max() <= 5 * 0.5 / math.sqrt(len(counters)) + 0.01


def test_torch_generator_is_not_touched() -> None:
    state = torch.get_rng_state()
    block = BLOCKS["odd layers"]
    counts = counts_of(block, 0.1)
    cpu.randomk_positions(block, counts, torch.zeros(int(counts.sum()), dtype=torch.int64), KEY)
    payload = torch.zeros(payload_bytes(QSGD(4), block), dtype=torch.uint8)
    cpu.encode(QSGD(4), block, Compensated(normal()), payload, KEY)
    assert torch.equal(state, torch.get_rng_state())
