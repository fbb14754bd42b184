"""1-bit LAMB with dense averages, written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.optim import OneBitLamb
from local_training import backward, network, train
from models import flat
from pool import ranks

FREEZE, RATE, DECAY = 4, 0.01, 0.1


class Layer:
    """Algorithm 1 of the paper, with Adam's corrections of bias; ``c``, ``r`` and moments of one parameter."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter, self.trust, self.factor = parameter, 0.0, 1.0
        self.m, self.v, self.fresh = (torch.zeros_like(parameter) for _ in range(3))

    def root(self, squares: Tensor, steps: int) -> Tensor:
        return (squares / (1 - 0.999**steps)).sqrt() + 1e-8

    def move(self, gradient: Tensor, step: int) -> None:
        self.m = 0.9 * self.m + 0.1 * gradient
        self.fresh = 0.999 * self.fresh + 0.001 * gradient.square()
        if step < FREEZE:
            self.v = self.fresh
        root = self.root(self.v, min(step + 1, FREEZE))
        adam = self.m / (1 - 0.9 ** (step + 1)) / root
        update = adam + DECAY * self.parameter
        if step < FREEZE:
            rate = min(max(float(self.parameter.norm() / update.norm()), 0.01), 10.0)
            self.trust = 0.9 * self.trust + 0.1 * rate
        else:
            share = min(1.0, float(adam.norm() / update.norm()))
            wanted = float((root / self.root(self.fresh, step + 1)).max()) * share + 1 - share
            wanted = min(max(wanted, 0.5), 4.0)
            self.factor = min(max(wanted, 0.9 * self.factor), 1.1 * self.factor)
            rate = self.trust / (1 - 0.9**FREEZE) * self.factor
        self.parameter -= RATE * rate * update


@ranks(2)
def test_with_dense_averages_it_is_lamb() -> None:
    ours, theirs = network(), network()
    settings = {"lr": RATE, "weight_decay": DECAY, "floor": 0.0, "method": "dense"}
    optimizer = OneBitLamb(ours.named_parameters(), FREEZE, **settings)
    sync = gradwire.Synchronizer(theirs.named_parameters(), "dense")
    layers = [Layer(each.data) for each in theirs.parameters()]
    for step in range(12):
        train(ours, optimizer, range(step, step + 1))
        backward(theirs, step)
        sync.synchronize()
        for layer, parameter in zip(layers, theirs.parameters(), strict=True):
            assert parameter.grad is not None
            layer.move(parameter.grad, step)
    assert not all(math.isclose(layer.factor, 1.0) for layer in layers)
    for layer, parameter in zip(layers, ours.parameters(), strict=True):
        assert float(optimizer.state[parameter]["factor"]) == pytest.approx(layer.factor, rel=1e-2)
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=0, atol=2e-5)
    optimizer.close()
    sync.close()
