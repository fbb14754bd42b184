"""How long a spike goes on in averages: not at all in dense ones, long in signs, unless spikes are clipped."""

import torch

from gradwire_bench import spikes
from gradwire_bench.spikes import Spiking, traces
from gradwire_bench.trial import Averages, Trial, run


def test_a_spike_goes_on_where_a_memory_keeps_it(monkeypatch) -> None:
    monkeypatch.setattr(spikes, "SPIKE", 22)
    trial, made = Trial("language", "sgd", 2, "ddp", 1.0, 0), []

    def averages(net: torch.nn.Module, trial: Trial, steps: int) -> Averages:
        made.append(Spiking(net, trial, steps, ("dense", "efsignsgd")))
        return made[0]

    steps = 30
    beside = run(trial, steps, lambda step: None, samples=64, averages=averages)
    assert beside == run(trial, steps, lambda step: None, samples=64), "they change nothing"
    dense, signs = made[0].lengths
    assert all(len(lengths) == steps for lengths in (*dense, *signs))
    assert max(dense[0]) == dense[0][22] > 10 * dense[1][22]
    assert [traces(each)[1] for each in (*dense, *signs)] == [0, 0, 7, 0]
