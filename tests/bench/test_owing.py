"""What a line owes to a training is what its memories hold."""

import pytest
import torch

from gradwire_bench.owed import Owing
from gradwire_bench.trial import Averages, Trial, run

TRIAL = Trial("language", "sgd", 2, "ddp", 1.0, 0)
LINES = ("deadzone:bits=0.2,granularity=bucket", "topk:ratio=0.05", "dense")


def test_what_is_owed_is_what_memories_hold() -> None:
    made = []

    def averages(net: torch.nn.Module, trial: Trial, steps: int) -> Averages:
        made.append(Owing(net, trial, steps, LINES))
        return made[0]

    steps = 5
    beside = run(TRIAL, steps, lambda step: None, samples=64, averages=averages)
    assert beside == run(TRIAL, steps, lambda step: None, samples=64), "they change nothing"
    (owing,) = made
    assert len(owing._worlds[0].engines[0].store.stacks("budget")) > 1
    for world, gap, owed in zip(owing._worlds, owing._lacking, owing.owed, strict=True):
        assert len(owed) == steps
        kept = [engine.store.state().get("residual", {}) for engine in world.engines]
        held = sum(
            float(torch.stack([each[name] for each in kept]).double().mean(0).square().sum()) for name in kept[0]
        )
        assert float(gap.square().sum()) == pytest.approx(held, rel=1e-3, abs=1e-12)
    assert owing.owed[0][-1] > owing.owed[2][-1]
    assert owing.bytes[2] > 20 * owing.bytes[0]
