"""torchft: replicas are killed and come again while training goes on, and its own averages are compressed."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.errors import ConfigurationError, WireError
from models import batch, flat, network
from pool import Pool

pytest.importorskip("torchft")

EXAMPLE = Path(__file__).parents[2] / "examples" / "with_torchft.py"
REPLICA = """
import os, runpy, sys
from torch.distributed import TCPStore

store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(store.port), RANK="0", WORLD_SIZE="1")
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def lighthouse() -> Iterator[Any]:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="[::]:0", min_replicas=2, join_timeout_ms=1000, quorum_tick_ms=20, heartbeat_timeout_ms=1000
    )
    yield server
    server.shutdown()


class Replica:
    """A process of the example, as torchrun would start it, and what it prints."""

    def __init__(self, number: int, address: str, *arguments: str) -> None:
        environment = {**os.environ, "TORCHFT_LIGHTHOUSE": address, "OMP_NUM_THREADS": "1", "RUST_LOG": "off"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, "-c", REPLICA, str(EXAMPLE), "--replica", str(number), *arguments]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.lines: list[str] = []
        self._coming: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._coming.put(line)
        self._coming.put(None)

    def until(self, pattern: str) -> str:
        """Reads on to the first line that matches."""
        while (line := self._coming.get(timeout=60)) is not None:
            self.lines.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError(f"ended without {pattern!r}: {self.lines[-20:]}")


def test_a_replica_is_killed_and_comes_again(lighthouse: Any) -> None:
    arguments = ("--steps", "80", "--pause", "0.1")
    with contextlib.ExitStack() as stack:

        def start(number: int) -> Replica:
            replica = Replica(number, lighthouse.address(), *arguments)
            stack.callback(replica.process.kill)
            return replica

        stays = [start(0), start(1)]
        killed = start(2)
        for each in (*stays, killed):
            each.until("taken by 3")
        killed.process.send_signal(signal.SIGKILL)
        for each in stays:
            each.until(" taken by 2")
        again = start(2)
        for each in (*stays, again):
            each.until(" taken by 3")
        weights = {each.until("^weights ").split(",")[0] for each in (*stays, again)}
    assert len(weights) == 1
    for each in stays:
        assert sum("not taken" in line for line in each.lines) <= 3
        taken = [int(found[1]) for line in each.lines if (found := re.match(r"step (\d+) taken", line))]
        assert taken == sorted(set(taken))
        losses = [float(found[1]) for line in each.lines if (found := re.search(r"loss (\S+)", line))]
        assert losses[-1] < losses[0]


def managed(address: str, **arguments: Any) -> tuple[Any, nn.Module, torch.optim.Optimizer, Any]:
    """This process as a replica: its manager, model, optimizer, and what is to be kept."""
    from torchft import Manager, ProcessGroupGloo

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    usual: dict[str, Any] = {"min_replica_size": dist.get_world_size(), "timeout": timedelta(seconds=30)}
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=net.load_state_dict,
        state_dict=net.state_dict,
        replica_id=f"replica_{dist.get_rank()}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=address,
        **{**usual, **arguments},
    )
    return manager, net, optimizer, store


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs, labels = batch(dist.get_rank(), step)
    return nn.functional.cross_entropy(model(inputs), labels)


def with_ddp(address: str, method: str | None, options: dict[str, Any]) -> tuple[Tensor, Any]:
    from torchft import DistributedDataParallel, Optimizer

    manager, net, inner, _store = managed(address)
    averages = attached(manager, method, options)
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, inner)
    fails = method == "bf16" and dist.get_rank() == 1
    while (step := manager.current_step()) < 4:
        optimizer.zero_grad()
        if fails and step == 2:  # nobody takes this step, and all go on in another group
            fails = False
            averages._averages.wire.fail(WireError("all-reduce", 0.0, None, "broken"))
        loss_of(model, step).backward()
        optimizer.step()
    return finished(manager, net, averages)


def with_local_sgd(address: str, method: str | None, options: dict[str, Any]) -> tuple[Tensor, Any]:
    from torchft.local_sgd import LocalSGD

    manager, net, optimizer, _store = managed(address)
    averages = attached(manager, method, options)
    with LocalSGD(manager, net, optimizer, sync_every=2):
        for step in range(6):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()
    return finished(manager, net, averages)


def with_diloco(address: str, method: str | None, options: dict[str, Any]) -> tuple[Tensor, Any]:
    from torchft.local_sgd import DiLoCo

    manager, net, optimizer, _store = managed(address, use_async_quorum=False)
    averages = attached(manager, method, options)
    outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    with DiLoCo(manager, [net], optimizer, outer, sync_every=3):
        for step in range(9):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()
    return finished(manager, net, averages)


def attached(manager: Any, method: str | None, options: dict[str, Any]) -> Any:
    from gradwire.integrations.torchft import compress

    return None if method is None else compress(manager, method, **options)


def finished(manager: Any, net: nn.Module, averages: Any) -> tuple[Tensor, Any]:
    dist.barrier()
    manager.shutdown(wait=False)
    if averages is not None:
        averages.close()
    return flat(net), None if averages is None else averages.stats()


@pytest.mark.parametrize("way", [with_ddp, with_local_sgd, with_diloco])
def test_torchfts_own_averages_are_compressed(pool: Pool, lighthouse: Any, way: Any) -> None:
    (theirs, _), _ = pool.run(2, way, lighthouse.address(), None, {})
    (dense, _), _ = pool.run(2, way, lighthouse.address(), "dense", {})
    torch.testing.assert_close(dense, theirs, rtol=0, atol=1e-6)
    (first, stats), (second, _) = pool.run(2, way, lighthouse.address(), "qsgd", {"bits": 8})
    assert torch.equal(first, second)
    assert stats.ratio > 2
    assert stats.steps >= 3
    assert 0 < float((first - theirs).norm() / theirs.norm()) < 0.1


def test_a_failed_average_costs_a_step(pool: Pool, lighthouse: Any) -> None:
    (theirs, _), _ = pool.run(2, with_ddp, lighthouse.address(), None, {})
    (first, stats), (second, _) = pool.run(2, with_ddp, lighthouse.address(), "bf16", {})
    assert torch.equal(first, second)
    assert stats.steps > 4
    torch.testing.assert_close(first, theirs, rtol=0, atol=1e-2)


def misuses(address: str) -> None:
    from gradwire.integrations.torchft import compress

    manager, net, _, _store = managed(address)
    for arguments, message in (
        (("topk",), r"topk.* remembers by parameter.*give parameters=model and call synchronize"),
        (("auto",), "method='auto' and inside= are for workers that stay"),
        (({"*": "qsgd"},), "remembers by parameter"),
        (("topkk",), "did you mean 'topk'"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            compress(manager, *arguments)
    with pytest.raises(ConfigurationError, match=r"manager is or has a Linear; give a torchft.Manager"):
        compress(nn.Linear(2, 2), "topk", parameters=net)
    averages = compress(manager, "topk", ratio=0.05, parameters=net)
    with pytest.raises(ConfigurationError, match="has a method of gradwire's already"):
        compress(manager, "qsgd")
    with pytest.raises(ConfigurationError, match=r"no quorum was begun; call manager\.start_quorum"):
        averages.synchronize()
    finished(manager, net, averages)


def test_misuse_is_told(pool: Pool, lighthouse: Any) -> None:
    pool.run(2, misuses, lighthouse.address())
