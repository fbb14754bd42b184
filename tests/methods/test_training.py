"""Every method trains a real model on real images as well as dense averaging does."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import digits
from digits import network
from gradwire import methods
from gradwire.engine.configuration import Configuration
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld

WORKERS = 2


@dataclass(frozen=True)
class Settings:
    """With what a method trains a small network in a few hundred steps."""

    options: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 0.05
    momentum: float = 0.9


SIGNS = Settings(learning_rate=0.004, momentum=0.0)  # every coordinate moves by it
OWN_MOMENTUM = Settings({"ratio": 0.1}, learning_rate=0.3, momentum=0.0)  # forgotten wherever it was sent
SETTINGS = {
    "signsgd": SIGNS,
    "signum": SIGNS,
    "lion": SIGNS,
    "lioncub": SIGNS,
    "demo": SIGNS,
    "dion": Settings(learning_rate=0.03, momentum=0.0),
    "dgc": OWN_MOMENTUM,
    "sketchedsgd": OWN_MOMENTUM,
    "topk": Settings({"ratio": 0.05}),
    "ef21": Settings({"ratio": 0.1}),
    "ef21sgdm": Settings({"ratio": 0.1}, learning_rate=0.3, momentum=0.0),
    "blocksgdm": Settings(learning_rate=0.3, momentum=0.0),
    "randomk": Settings({"ratio": 0.1}),
    "gspar": Settings({"ratio": 0.1}),
    "sbc": Settings({"ratio": 0.1}),
    "gtopk": Settings({"ratio": 0.05}),
    "oktopk": Settings({"ratio": 0.05}),
    "scalecom": Settings({"ratio": 0.05}),
    "gaussiank": Settings({"ratio": 0.05}),
    "sidco": Settings({"ratio": 0.05}),
    "dryden": Settings({"ratio": 0.05}),
    "sketchml": Settings({"ratio": 0.1}),
    "adaptive": Settings({"memory": "residual"}),
    "gradiveq": Settings({"learn_steps": 20, "use_steps": 80}),
}


@cache
def accuracy(method: str) -> float:
    """All workers share the one model, as they would have the same: every average is the same bits on each."""
    net, chosen = network(), SETTINGS.get(method, Settings())
    own = dict(chosen.options)
    slots = flat_slots([(name, tuple(each.shape)) for name, each in net.named_parameters()][::-1])
    world = LocalWorld(Configuration.make(method, own, memory=own.pop("memory", None)), slots, WORKERS)
    optimizer = torch.optim.SGD(net.parameters(), lr=chosen.learning_rate, momentum=chosen.momentum)

    def give(images: Tensor, labels: Tensor) -> None:
        gradients = [gradient(net, images[rank::WORKERS], labels[rank::WORKERS]) for rank in range(WORKERS)]
        world.average(gradients)
        for slot in slots:
            net.get_parameter(slot.name).grad = gradients[0][slot.offset : slot.stop].view(slot.shape)

    digits.train(optimizer, chosen.learning_rate, give)
    return digits.accuracy(net)


def gradient(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Of a worker's share of the batch, in one flat buffer, the last parameter first."""
    loss = nn.functional.cross_entropy(net(images), labels)
    return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(net.parameters()))[::-1]])


@pytest.mark.parametrize("method", methods.names())
def test_accuracy_is_within_two_percent_of_dense(method: str) -> None:
    assert accuracy("dense") > 95
    assert accuracy(method) >= accuracy("dense") - 2
