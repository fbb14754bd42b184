"""Runs of Ray Train, most of the example's: ``python tests/ray_runs.py FOLDER`` prints what they left as JSON."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import with_ray
from torch import nn

import gradwire
import gradwire.integrations.ray

Loop = Callable[[dict[str, Any]], None]


def run(loop: Loop, folder: str, workers: int, **config: Any) -> Any:
    """Has workers run a loop, from the last checkpoint of whatever ran in this folder."""
    trainer = ray.train.torch.TorchTrainer(
        loop,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(name="gradwire", storage_path=folder),
    )
    return trainer.fit()


def saves_no_states(config: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model.pt").touch()
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def prepared() -> nn.Module:
    """A model of the example's."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 16))
    model: nn.Module = ray.train.torch.prepare_model(net)
    return model


def gradients(model: nn.Module) -> Iterator[torch.Tensor]:
    for step in range(2):
        rank = ray.train.get_context().get_world_rank()
        inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * rank + step))
        model(inputs).square().mean().backward()
        yield torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        model.zero_grad()


def looks(config: dict[str, Any]) -> None:
    """What this worker is told, and goes on with; it trains nothing that is kept."""
    told: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(listener)
    model = prepared()
    attachment = gradwire.integrations.ray.compress(model, "topk", ratio=0.05)
    found: dict[str, Any] = {"told": told}
    try:
        gradwire.integrations.ray.compress(model, "topk")
    except gradwire.ConfigurationError as error:
        found["twice"] = str(error)
    attachment.save(config["leaves"])
    attachment.close()
    if config["all"]:
        plain, dense, scaler = prepared(), prepared(), torch.amp.GradScaler("cpu", init_scale=8.0)
        attached = gradwire.compress(dense, "dense")
        both = zip(gradients(plain), gradients(dense), strict=True)
        found["same"] = all(torch.allclose(one, other, atol=1e-6) for one, other in both)
        attached.close()
        scaled = gradwire.compress(prepared(), "efsignsgd", grad_scaler=scaler)
        found["scaled"] = any(getattr(each, "_scaler", None) is scaler for each in scaled.engine.guards)
        scaled.close()
    if ray.train.get_context().get_world_rank() == 0:
        Path(config["leaves"], "found.json").write_text(json.dumps(found))


def weights(result: Any) -> tuple[list[str], list[str]]:
    """Digests of them, and the names of all files of the checkpoint."""
    with result.checkpoint.as_directory() as folder:
        saved = torch.load(Path(folder, "model.pt"), weights_only=True)
        files = sorted(path.name for path in Path(folder).iterdir())
    return [hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in saved["model"].values()], files


def owed(folder: str) -> list[float]:
    """The mean of what workers owe."""
    each = [torch.load(path, weights_only=True)["states"][0] for path in sorted(Path(folder).glob("gradwire-rank-*"))]
    means = [
        torch.stack([state["tensors"]["residual"][name] for state in each]).mean(0).flatten()
        for name in each[0]["tensors"]["residual"]
    ]
    return [float(value) for value in torch.cat(means)]


def main(folder: str) -> None:
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100_000_000)
    straight = with_ray.run(folder + "/straight", 4, 2, 2)
    with_ray.run(folder + "/again", 2, 2, 2)
    again = with_ray.run(folder + "/again", 4, 2, 2)
    three = with_ray.run(folder + "/fewer", 2, 2, 3)
    run(looks, folder + "/fewer", 2, leaves=folder + "/left", all=True)
    with three.checkpoint.as_directory() as left:
        before = owed(left)
    after = owed(folder + "/left")
    run(saves_no_states, folder + "/empty", 2)
    run(looks, folder + "/empty", 2, leaves=folder + "/nothing", all=False)
    print(
        json.dumps(
            {
                "weights": [weights(each) for each in (straight, again)],
                "metrics": again.metrics,
                "looked": json.loads(Path(folder, "left", "found.json").read_text()),
                "owed": [before, after],
                "empty": json.loads(Path(folder, "nothing", "found.json").read_text()),
            },
            default=str,
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
