"""What compression owes goes on where the model is cut in another way."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import ConfigurationError
from pool import Pool
from sharded import Net, hsdp, loss, replicated, train

ALL = gradwire.DensePolicy(below=0, vectors=False)


def elsewhere(folder: str, method: str, options: dict[str, Any]) -> None:
    """A step without gradients brings what is owed, and nothing else, to models cut otherwise or not at all."""
    from torch.distributed.tensor import DTensor

    model = hsdp()
    with closing(gradwire.compress(model, method, dense=ALL, **options)) as handle:
        train(model, range(3))
        owed = gradwire.Owed(handle, model)
        expected = {name: each.full_tensor() for name, each in owed.state_dict().items() if isinstance(each, DTensor)}
        assert any(each.any() for each in expected.values())
        dcp.save({"owed": owed}, checkpoint_id=folder)
    others: list[Any] = [hsdp(), replicated(), DistributedDataParallel(Net())]
    for other in others:
        with closing(gradwire.compress(other, "dense")) as handle:
            dcp.load({"owed": gradwire.Owed(handle, other)}, checkpoint_id=folder)
            (0 * loss(other, 0)).backward()
            for name, each in other.named_parameters():
                assert each.grad is not None
                found = each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
                assert torch.allclose(found, expected[name.removeprefix("module.")], rtol=1e-5, atol=1e-7), name
            other.zero_grad()
            (0 * loss(other, 0)).backward()
            assert not any(bool(each.grad.norm()) for each in other.parameters() if each.grad is not None)


@pytest.mark.parametrize(
    ("method", "options"), [("topk", {"ratio": 0.05}), ("acpsgd", {"rank": 1}), ("efsignsgd", {"route": "sharded"})]
)
def test_what_is_owed_goes_to_another_cut(pool: Pool, tmp_path: Path, method: str, options: dict[str, Any]) -> None:
    pool.run(4, elsewhere, str(tmp_path), method, options)


def misfits() -> None:
    model = DistributedDataParallel(Net())
    with closing(gradwire.compress(model, "topk")) as handle:
        with pytest.raises(ConfigurationError, match="the model has no parameter"):
            gradwire.Owed(handle, torch.nn.Linear(3, 3))
        owed = gradwire.Owed(handle, model)
        state = owed.state_dict()
        with pytest.raises(ConfigurationError, match=r"nothing owed to 'last.bias' of shape \(5,\)"):
            owed.load_state_dict({**state, "last.bias": torch.zeros(4)})
        assert dist.get_world_size() == 2


def test_another_model_is_told(pool: Pool) -> None:
    pool.run(2, misfits)
