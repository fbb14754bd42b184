"""The page on formats says what codecs write: its examples are made anew and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire
from golden import noting, stored
from gradwire import methods
from gradwire.codecs import index
from gradwire.codecs.index import IndexCoding
from gradwire.codecs.quantize import values as value_codings
from gradwire.engine import agreement
from gradwire.engine.configuration import Configuration
from gradwire.errors import ConfigurationError
from gradwire.layout import Block, Granularity, Slot, flat_slots
from gradwire.local.world import LocalWorld
from gradwire.policy import DensePolicy
from gradwire.randomness import hash32, key_of, run_keys
from pool import Pool

PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
KEY = key_of(0, 0, 0)


def rows(*header: str) -> list[list[str]]:
    """The cells of the table with this header, without the backquotes around them."""
    (_, _, table) = PAGE.partition("| " + " | ".join(header) + " |\n|" + "---|" * len(header) + "\n")
    assert table, header
    lines = table.partition("\n\n")[0].splitlines()
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def hexadecimal(payload: torch.Tensor) -> str:
    """A payload in words of 4 bytes."""
    return bytes(payload.contiguous().view(-1).view(torch.uint8).tolist()).hex(" ", -4)


def numbers(text: str) -> torch.Tensor:
    return torch.tensor([float(each) for each in text.split()])


@pytest.mark.parametrize("row", rows("seed, step, rank", "parameter", "key", "run's key", "hashes of elements 0, 1, 2"))
def test_random_numbers_are_keyed_as_the_page_says(row: list[str]) -> None:
    of, name, key, run_key, hashes = row
    seed, step, rank = map(int, of.split(","))
    block = Block.cut([Slot(name, (3,), 0)], Granularity("layer"))
    (keyed,) = run_keys(key_of(seed, step, rank), block.streams).tolist()
    drawn = " ".join(f"{each:08x}" for each in hash32(keyed, torch.arange(3)).tolist())
    assert [f"{key_of(seed, step, rank):016x}", f"{keyed:016x}", drawn] == [key, run_key, hashes]


@pytest.mark.parametrize("row", rows("name", "values", "payload"))
def test_values_are_written_as_the_page_says(row: list[str]) -> None:
    name, text, payload = row
    coding, values = value_codings.parse(name), numbers(text)
    block = Block.cut(flat_slots([("w", (len(values),))]), Granularity("layer"))
    written = torch.full((coding.size(block),), 255, dtype=torch.uint8)
    coding.encode(block, values, written, KEY)
    assert hexadecimal(written) == payload


@pytest.mark.parametrize("row", rows("name", "positions", "below", "payload"))
def test_positions_are_written_as_the_page_says(row: list[str]) -> None:
    name, text, below, payload = row
    coding: IndexCoding = index.parse(name)
    positions = numbers(text).long()
    written = torch.full((coding.size(len(positions), int(below)),), 255, dtype=torch.uint8)
    assert coding.encode(positions, int(below), written) == len(positions)
    assert hexadecimal(written) == payload


@pytest.mark.parametrize("row", rows("method", "options", "rounds", "payload"))
def test_methods_write_what_the_page_says(row: list[str]) -> None:
    name, options, kinds, payloads = row
    given: dict[str, Any] = eval(f"dict({options})")
    everything = DensePolicy(below=0, vectors=False)
    world = LocalWorld(Configuration.make(name, given, dense=everything), flat_slots([("w", (5,))]), workers=1)
    with noting() as (asked, *_):
        world.average([numbers("1 -2 0.5 0 -0.5")])
    assert ", ".join(kind for kind, _ in asked) == kinds
    assert "; ".join(hexadecimal(each) for _, each in asked) == payloads


def test_the_rounds_of_every_method_on_every_route_are_on_the_page() -> None:
    """As the golden vectors have them: two workers or more, whatever is averaged densely beside it left out."""
    told: dict[tuple[str, str], list[str]] = {}
    above = ""
    for names, route, kinds, _ in rows("method", "route", "rounds", "what"):
        above = above if names == "the same" else names.replace("`", "")
        told |= {(name, route): kinds.split(", ") for name in above.split(", ")}
    assert set(told) == {(name, route) for name in methods.names() for route in methods.get(name).routes}
    for (name, route), kinds in told.items():
        found = [record for case, record in stored(name).items() if case.startswith("small") and f"-{route}-" in case]
        asked = [what.split(maxsplit=4)[4] for what in found[0] if " request " in what]
        dense = [] if methods.get(name)().accepts((5,)) else ["AllReduceMean float32[5]"]
        assert [each.split()[0] for each in asked if each not in dense] == kinds, (name, route)


def disagree() -> str:
    agreement.FORMAT_VERSION += torch.distributed.get_rank()
    try:
        gradwire.Synchronizer([("w", torch.nn.Parameter(torch.zeros(3)))], "topk")
    except ConfigurationError as error:
        return str(error)
    finally:
        agreement.FORMAT_VERSION = gradwire.FORMAT_VERSION
    return "agreed"


def test_ranks_of_different_versions_refuse_one_another(pool: Pool) -> None:
    version = gradwire.FORMAT_VERSION
    for said in pool.run(2, disagree):
        assert f"rank 0 has 'payload formats, version {version}', rank 1 has" in said
    assert f"Version {version}\n(`gradwire.FORMAT_VERSION`)" in PAGE
