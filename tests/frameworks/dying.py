"""One of two workers, the second of which is killed in the middle of its training.

What the first is told then, and after how many seconds, is left in ``FOLDER/told.json``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from arrays import gradients
from keras_models import fit, model, own
from synchronizers import attached

STEPS = 200
Train = Callable[[Callable[[int], None]], object]


def by_fit() -> tuple[Any, Train]:
    import keras

    import gradwire.keras

    net = model()
    handle = gradwire.keras.compress(net, "topk", ratio=0.05)

    def train(before: Callable[[int], None]) -> None:
        called = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: before(batch))
        fit(net, *own(16 * STEPS, 16), batch=8, callbacks=[called])

    return handle, train


def by_loop(framework: str) -> tuple[Any, Train]:
    sync, average = attached(framework, "topk", ratio=0.05)

    def train(before: Callable[[int], None]) -> None:
        for step in range(STEPS):
            before(step)
            average(gradients(dist.get_rank(), step))

    return sync, train


def main(framework: str, folder: Path, rank: int) -> None:
    """Trains by ``fit`` where the framework is "keras"."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    handle, train = by_fit() if framework == "keras" else by_loop(framework)

    def before(step: int) -> None:
        if rank == 1 and step == 20:
            (folder / "died").write_text(str(time.time()))
            os._exit(7)

    try:
        train(before)
    except Exception as error:
        seconds = time.time() - float((folder / "died").read_text())
        told = {"seconds": seconds, "text": str(error), "failed": type(handle.failed).__name__}
        (folder / "told.json").write_text(json.dumps(told))
