"""What a class of one's own declares that could not be meant: options that never reach it, parts that are not there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import gradwire
from gradwire import ConfigurationError, own
from gradwire.methods import LayerMethod, LayerState
from gradwire.methods import registry as methods_registry
from gradwire.methods.registry import methods
from gradwire.wire import AllReduceMean
from gradwire_bench import catalogue, handbook
from gradwire_bench.contenders import Contender


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """What a test registers is known in that test only."""
    before = dict(methods._entries)
    yield
    methods._entries = before


def mean(self: LayerMethod, gradient: Tensor, state: LayerState) -> Any:
    return (yield AllReduceMean(gradient))


def registered(**parts: Any) -> type[LayerMethod]:
    """A method that is called ``mine``."""
    kind: Any = dataclass(frozen=True, kw_only=True)(type("Mine", (LayerMethod,), parts))
    made: type[LayerMethod] = gradwire.methods.register("mine")(kind)
    return made


@pytest.mark.parametrize("option", ["seed", "start", "name", "learning_rate", "preset"])
def test_an_option_named_as_what_is_chosen_with_every_method_is_refused(option: str) -> None:
    """It would be left at its default whatever was given: ``compress(model, "mine", start=50)`` means dense steps."""
    kind = registered(average=mean, __annotations__={option: "int"}, **{option: 1})
    for given in ("mine", kind()):
        with pytest.raises(ConfigurationError, match=f"^Mine has an option '{option}', which would never reach it"):
            gradwire.roundtrip(torch.ones(4, 3), given)


def test_what_is_declared_may_be_written_with_its_type() -> None:
    registered(average=mean, __annotations__={"memory": "str", "bias": "str"}, memory="none", bias="exact")
    assert gradwire.check("mine").holds


def test_a_method_without_its_average_is_told() -> None:
    registered(averge=mean)
    with pytest.raises(ConfigurationError, match=r"^Mine lacks average; write it, as its base class says"):
        gradwire.roundtrip(torch.ones(4, 3), "mine")


def test_a_class_that_there_is_not_is_no_class_to_be_silent_of() -> None:
    registered(average=mean, bias="unbaised")
    finding = next(each for each in gradwire.check("mine").findings if each.law == "unbaised, as declared")
    assert finding.holds is False
    assert finding.said == "bias='unbaised' is not known; declare one of exact, unbiased, contractive, biased"


@pytest.mark.parametrize("kind", ["str", str, "str | None", "str | Codec"])
def test_an_option_that_is_text_is_text_also_where_it_reads_as_a_number(kind: Any) -> None:
    registered(
        average=mean, __annotations__={"code": kind, "share": "float", "some": "int | str"}, code="x", share=1.0, some=1
    )
    for written in ("5", "0.10", "true", "1e3"):
        name, options = methods_registry.parse(f"mine:code={written},share={written},some=7")
        assert options["code"] == written
        assert not isinstance(options["share"], str)
        assert options["some"] == 7
        assert str(Contender.parse(f"mine:code={written}")) == f"{name}:code={written}"


def shown(name: str) -> str:
    """What ``gradwire methods NAME`` prints."""
    with (console := Console(width=100)).capture() as printed:
        console.print(handbook.description(*catalogue.entries([name])))
    return printed.get()


def test_a_method_whose_options_have_no_default_is_listed() -> None:
    """With all others, and with what a default is that is made anew each time, or in brackets."""
    made = {"tags": field(default_factory=lambda: [1, 2]), "like": "[red]x"}
    registered(average=mean, __annotations__={"k": "int", "tags": "list", "like": "str"}, wire_bits="k * d", **made)
    (entry,) = (each for each in catalogue.entries() if each.name == "mine")
    assert (entry.needs, entry.options, entry.bits) == (("k",), {"tags": [1, 2], "like": "[red]x"}, None)
    for line in ("no default: give it", "tags=[1, 2]", "like='[red]x'"):
        assert line in shown("mine")


def test_a_class_that_there_is_not_is_told_where_a_method_is_described() -> None:
    registered(average=mean, bias="unbaised")
    assert "bias='unbaised', which is none of unbiased, contractive, exact, biased" in shown("mine")


def test_what_is_no_dataclass_is_told_in_the_list_too() -> None:
    gradwire.methods.register("mine")(type("Mine", (LayerMethod,), {"average": mean}))
    with pytest.raises(ConfigurationError, match="Mine is no dataclass"):
        catalogue.entries()


@pytest.mark.parametrize(("names", "said"), [(("one/a.py", "two/a.py"), "one/a.py"), (("statistics.py",), "Python's")])
def test_files_that_are_called_as_others_are_told(
    names: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method of one would silently be that of the other, and whoever imports such a module would have the file."""
    monkeypatch.setenv(own.VARIABLE, "")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("taken = True")
    before = dict(sys.modules)
    with pytest.raises(ConfigurationError, match=rf"would take the place of .*{said}"):
        own.add([str(tmp_path / name) for name in names])
    assert sys.modules == before


def test_a_method_that_says_nothing_of_itself_is_listed_without_a_word() -> None:
    """Its dataclass would: ``Mine(*, k: 'int' = 1)``."""
    registered(average=mean, __annotations__={"k": "int"}, k=1)
    (entry,) = catalogue.entries(["mine"])
    assert (entry.summary, entry.about, entry.options) == ("", "", {"k": 1})
