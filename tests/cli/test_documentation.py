"""What is written about the public face is so: examples run, and every value that is accepted is named."""

from __future__ import annotations

import doctest
import importlib
import inspect
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import cli, granularity, memory, methods, routes
from gradwire.codecs import index, quantize

ROOT = Path(__file__).parents[2]
NAMES = granularity.names()


def block_with(text: str) -> list[str]:
    """The guide's pieces of Python in which some text is."""
    blocks = re.findall("```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)
    return [block for block in blocks if text in block]


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A group of one worker."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def examples() -> list[doctest.DocTest]:
    """All docstrings with examples."""
    found: dict[tuple[str | None, int | None], doctest.DocTest] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        if ">>> " in path.read_text():
            name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
            for each in doctest.DocTestFinder().find(importlib.import_module(name)):
                if each.examples:
                    found[each.filename, each.lineno] = each
    return list(found.values())


def namespace() -> dict[str, Any]:
    """What examples take for granted: a net, a model around it, a handle, and a step that has been taken."""
    torch.manual_seed(0)
    net, inputs = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 30)), torch.randn(8, 40)
    trained = gradwire.Synchronizer(net.named_parameters(), "topk")
    net(inputs).square().sum().backward()
    trained.synchronize()
    net.zero_grad()
    state = trained.state_dict()
    for rank in range(4):
        torch.save({**state, "rank": rank, "world_size": 4}, f"rank{rank}.pt")
    names: dict[str, Any] = {"DistributedDataParallel": DistributedDataParallel, "dcp": dcp, "gradwire": gradwire}
    names |= {"torch": torch, "net": net, "inputs": inputs, "handle": trained, "rank": 0, "path": "checkpoint"}
    names |= {"model": DistributedDataParallel(net), "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}
    return names | {"loss": net(inputs).square().sum()}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("example", examples(), ids=lambda each: each.name)
def test_examples_of_docstrings_run(example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example.globs = {**example.globs, **namespace()}
    failed, attempted = doctest.DocTestRunner().run(example, clear_globs=False)
    for each in example.globs.values():
        if isinstance(each, gradwire.Handle):
            each.close()
    assert attempted == len(example.examples)
    assert not failed
    assert not any(doctest.SKIP in each.options for each in example.examples), "examples are to be run"


def test_the_public_face_has_examples() -> None:
    shown = {example.name.rpartition(".")[2] for example in examples()}
    assert shown >= {"compress", "Synchronizer", "periodic", "PerRank", "SecondMoments", "redistribute", "analyze"}
    assert shown >= {"gradwire", "OneBitAdam", "ZeroOneAdam", "roundtrip"}


@pytest.mark.usefixtures("alone")
def test_a_method_for_each_parameter_as_the_guide_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    guide = (ROOT / "docs" / "training.md").read_text()
    blocks = re.findall("```python\n(.*?)```", guide[guide.index("## A method for each") :], re.DOTALL)[:2]
    names = namespace()
    for block in blocks:
        exec(block, names)
    assert not names["handle"].paused
    assert [type(rule.method).__name__ for rule in names["handle"].configuration.rules] == ["TopK", "ACPSGD", "Dense"]
    names["handle"].close()


def test_a_granularity_of_ones_own_as_the_guide_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = granularity.granularities
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    (block,) = block_with("granularity.register")
    exec(block, {"gradwire": gradwire, "math": math})
    (name,) = set(granularity.names()) - set(NAMES)
    assert gradwire.roundtrip(torch.ones(6, 5), "qsgd", granularity=name).wire_bytes


def test_lines_of_audits_are_shown_as_the_guide_has_it() -> None:
    (block,) = block_with("logging.")
    lines = [line for line in block.splitlines() if line.startswith("logging.")]
    program = "\n".join(["import logging", *lines, "logging.getLogger('gradwire').info('step 7')"])
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr
    assert "step 7" in shown


def argument(name: str) -> str:
    """What :func:`gradwire.compress` says of one of its arguments."""
    found = re.search(rf"^    {name}: (.*(?:\n {{8}}.*)*)", inspect.getdoc(gradwire.compress) or "", re.MULTILINE)
    assert found
    return found[1]


def test_every_memory_route_and_granularity_is_told() -> None:
    told = set(re.findall('``"(.*?)"``', argument("memory")))
    assert told == set(memory.names())
    told = set(re.findall('``"(.*?)"``', argument("route")))
    assert told == {route for name in methods.names() for route in methods.get(name).routes}
    told = set(re.findall('``"(.*?)"``', argument("granularity")))
    assert told == set(granularity.names())
    scopes = {scope.partition(":")[0] for name in methods.names() for scope in methods.get(name).granularities}
    blocks = {
        name
        for name in granularity.names()
        if ":" not in name and granularity.Granularity.parse(name).length is not None
    }
    assert {name.partition(":")[0] for name in told} - blocks == scopes


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("`owner=`", quantize.names),
        ("`indices=`", index.names),
        ("`memory=`", memory.names),
        ("`granularity=`", granularity.names),
        ("`route=`", routes.names),
    ],
)
def test_the_guide_has_all_names(choice: str, names: Callable[[], tuple[str, ...]]) -> None:
    guide = (ROOT / "docs" / "training.md").read_text()
    (row,) = (line.split("|")[2] for line in guide.splitlines() if line.startswith(f"| {choice}"))
    assert set(re.findall("`(.*?)`", row)) == set(names())


@pytest.mark.parametrize("attach", [gradwire.Synchronizer, gradwire.periodic])
def test_other_ways_in_refer_to_compress(attach: object) -> None:
    told = inspect.getdoc(attach) or ""
    assert "granularity: As in :func:`gradwire.compress`" in told
    for name in ("route", "memory", "owner"):
        assert f"{name}: See there" in told


def commands() -> list[str]:
    """All examples of the command line: in its help, in the README and in the documents."""
    texts = [path.read_text() for path in (ROOT / "src" / "gradwire" / "cli").glob("*.py")]
    texts += [path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    lines = {line.partition("#")[0].strip() for text in texts for line in re.findall("^ *(gradwire .*)$", text, re.M)}
    return sorted(line for line in lines if re.match("gradwire (methods|analyze|bench|doctor|lab)", line))


@pytest.mark.parametrize("command", commands())
def test_examples_of_the_command_line_are_understood(command: str) -> None:
    """They are parsed and not run."""
    called, bound, _ = cli.app.parse_args(command.split()[1:], exit_on_error=False, print_error=False)
    assert callable(called)
    assert bound.signature
