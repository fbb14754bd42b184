"""Optimizers of the benchmarks' trainings: Muon for hidden matrices, beside AdamW."""

import pytest
import torch
import torch.nn.functional as F

from gradwire.errors import ConfigurationError
from gradwire_bench.nets import ByteGPT, ByteNet, ResNet20
from gradwire_bench.optimizers import base_rate, one_cycle, optimizer_of
from gradwire_bench.workloads import LANGUAGE


def train(net, *optimizers) -> torch.Tensor:
    schedules = [one_cycle(each, 0.01, 4) for each in optimizers]
    for step in range(4):
        read = torch.arange(16).view(2, 8) + step
        F.cross_entropy(net(read), read.flatten() + 1).backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return torch.cat([each.detach().flatten() for each in net.parameters()])


def test_muon_is_torchs_for_hidden_matrices_and_adamw_for_all_else():
    together, apart = ByteNet(), ByteNet()
    apart.load_state_dict(together.state_dict())
    hidden = [apart.recurrence.weight_ih_l0, apart.recurrence.weight_hh_l0]
    others = [
        apart.embedding.weight,
        apart.recurrence.bias_ih_l0,
        apart.recurrence.bias_hh_l0,
        *apart.head.parameters(),
    ]
    muon = torch.optim.Muon(hidden, 0.01, adjust_lr_fn="match_rms_adamw")
    expected = train(apart, muon, torch.optim.AdamW(others, 0.01))
    assert torch.equal(train(together, optimizer_of("muon", together, 0.01)), expected)


def test_an_embedding_that_makes_the_scores_too_is_no_hidden_matrix():
    net = ByteGPT(64, 2)
    names = {id(each): name for name, each in net.named_parameters()}
    muon, adamw = optimizer_of("muon", net, 0.01).param_groups
    assert all(each.dim() == 2 and "layers" in names[id(each)] for each in muon["params"])
    assert {"words.weight", "places.weight"} < {names[id(each)] for each in adamw["params"]}
    assert len(muon["params"]) + len(adamw["params"]) == len(names)


def test_convolutions_are_no_matrices():
    with pytest.raises(ConfigurationError, match="ResNet20 has no hidden matrix for Muon; take adamw"):
        optimizer_of("muon", ResNet20(8), 0.01)


def test_learning_rates_to_begin_with():
    names = ("sgd", "momentum", "adamw", "muon")
    assert [base_rate(LANGUAGE, name) for name in names] == pytest.approx([2.0, 0.2, 0.01, 0.01])
