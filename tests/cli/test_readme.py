"""The method that the README adds works as it says."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.methods import registry
from pool import Pool

README = Path(__file__).parents[2] / "README.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def own_method() -> str:
    (example,) = [block for block in blocks() if "methods.register" in block]
    return example


@contextmanager
def catalogue_as_it_is() -> Iterator[None]:
    """Takes what is registered meanwhile out again, here or in a rank, which other tests have after this one."""
    before = dict(registry.methods._entries)
    try:
        yield
    finally:
        registry.methods._entries = before


def run(source: str) -> None:
    """As a user's own file would."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own_method.py"
        path.write_text(source)
        runpy.run_path(str(path))


def test_what_is_called_does_something() -> None:
    """A context manager that is called and not entered does nothing."""
    nodes = [node for block in blocks() for node in ast.walk(ast.parse(block))]
    called = [node.value.func for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    ours = {name for name in map(ast.unparse, called) if re.fullmatch(r"gradwire\.\w+", name)}
    assert "gradwire.compress" in ours
    for name in ours:
        assert not inspect.isgeneratorfunction(inspect.unwrap(getattr(gradwire, name.partition(".")[2]))), name


def test_it_is_under_thirty_lines() -> None:
    assert len(own_method().splitlines()) < 30


def test_it_round_trips() -> None:
    low_rank = torch.outer(torch.arange(40.0), torch.arange(50.0)) / 100
    with catalogue_as_it_is():
        run(own_method())
        back = gradwire.roundtrip(low_rank, "my-powersgd", rank=2)
    torch.testing.assert_close(back.decoded, low_rank, rtol=1e-4, atol=1e-3)
    assert back.wire_bytes == 4 * 2 * (40 + 50)


def test_the_laws_hold() -> None:
    """As the README says of it, also of shapes that go dense where a model is attached."""
    with catalogue_as_it_is():
        run(own_method())
        found = gradwire.check("my-powersgd", rank=2)
    assert found.holds, str(found)


@catalogue_as_it_is()
def train_with(source: str) -> tuple[bytes, list[str]]:
    run(source)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(60, 80), nn.Linear(80, 10)))
    handle = gradwire.compress(model, "my-powersgd", rank=2, dense=gradwire.DensePolicy(below=100))
    for step in range(5):
        inputs = torch.randn(8, 60, generator=torch.Generator().manual_seed(10 * dist.get_rank() + step))
        model.zero_grad()
        model(inputs).square().sum().backward()
    gradients = [parameter.grad.view(-1) for parameter in model.parameters() if parameter.grad is not None]
    fields = sorted(handle.state_dict()["tensors"])
    handle.close()
    return torch.cat(gradients).numpy().tobytes(), fields


def test_it_trains(pool: Pool) -> None:
    (first, fields), *others = pool.run(3, train_with, own_method())
    assert all(other == (first, fields) for other in others)
    assert fields == ["q", "residual"]
