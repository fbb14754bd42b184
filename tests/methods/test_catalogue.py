"""The catalogue as users see it: measured, printed, documented."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire
from catalogue import has_momentum
from gradwire.engine.configuration import Configuration
from gradwire.errors import ConfigurationError
from gradwire.layout import flat_slots
from gradwire.local.world import LocalWorld
from gradwire_bench import catalogue, handbook
from gradwire_bench.contenders import Contender
from gradwire_bench.data import DataSource
from gradwire_bench.gradients import Recording, real_gradients

DIGITS = DataSource("digits", None, "")


def test_a_world_in_one_process_gives_what_processes_give() -> None:
    """The mean exactly, for the exact method, and the same bits on all ranks for every method."""
    slots = flat_slots([("weight", (40, 50)), ("bias", (40,))])
    for name in gradwire.methods.names():
        gradients = [torch.randn(2040, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
        mean = torch.stack(gradients).mean(0)
        LocalWorld(Configuration.make(name, {}), slots, 3).average(gradients)
        assert torch.equal(gradients[0], gradients[1]), name
        assert torch.equal(gradients[0], gradients[2]), name
        kind = gradwire.methods.get(name)
        if not kind.takes_all and kind.dense.keeps_dense((40,)) and not has_momentum(kind):
            torch.testing.assert_close(gradients[0][2000:], mean[2000:])
        if name == "dense":
            torch.testing.assert_close(gradients[0], mean)


def test_measurements_cover_every_method() -> None:
    names = gradwire.methods.names()
    measured = catalogue.measure(
        names, 10_000, Recording.of("digits", real_gradients(DIGITS, catalogue.WORKERS, steps=2))
    )
    assert [each.name for each in measured] == list(names)
    by_name = {each.name: each for each in measured}
    assert by_name["dense"].bits == 32
    assert by_name["dense"].error == pytest.approx(0, abs=1e-12)
    assert all(each.encode_gbps > 0 and each.bits > 0 for each in measured)
    assert all(each.error is not None and each.error >= 0 for each in measured)


def test_the_page_holds_what_the_classes_declare() -> None:
    entries = catalogue.entries()
    page = handbook.page(entries, [], "nowhere", {})
    for entry in entries:
        kind = gradwire.methods.get(entry.name)
        learning = f", learning `{kind.learning_bits}`" if kind.learning_bits else ""
        assert f"| `{entry.name}`<br>{entry.summary} | {kind.bias} | `{kind.wire_bits}`{learning} |" in page
        assert kind.citation in page
        assert kind.published.note in page
    assert "| `terngrad` | `clip=2.5`, `route='allreduce'` | `clip=0.0`, `route='sharded'` | Clipping" in page


def test_what_was_published_under_other_names_is_a_line_with_its_memory() -> None:
    page = handbook.page(catalogue.entries(), [], "nowhere", {})
    remembered = {"DIANA": "diana", "DRIVE": "none", "EF21-BC": "ef21"}
    for name, line, source in handbook.OTHER_NAMES:
        assert str(Contender.parse(line).configuration().memory) == remembered.get(name, "residual")
        assert f"| {name} | `{line}` | {source} |" in page


@pytest.mark.parametrize("name", gradwire.methods.names())
def test_what_was_published_can_be_had_and_differs_from_the_defaults(name: str) -> None:
    published = gradwire.methods.get(name).published
    usual, paper = Configuration.make(name, {}), Configuration.make(name, {"preset": "paper"})
    for setting, value in published.options.items():
        assert getattr(paper.method, setting) == value != getattr(usual.method, setting)
    for choice in published.choices:
        assert getattr(paper, choice) != getattr(usual, choice)
    assert published.note or not published.settings
    if not published.settings:
        assert paper == usual


@pytest.mark.parametrize("name", gradwire.methods.names())
def test_no_method_has_its_note_from_one_of_another_publication(name: str) -> None:
    kind = gradwire.methods.get(name)
    if kind.published.note:
        assert next(each for each in kind.__mro__ if "published" in vars(each)).citation == kind.citation


def test_what_goes_dense_is_said() -> None:
    assert str(Configuration.make("signsgd", {})).endswith("dense: nothing)")
    assert str(Configuration.make("topk", {})).endswith("dense: 1-D tensors and tensors below 1,024 elements)")


def test_what_is_given_counts_more_than_the_preset() -> None:
    paper = Configuration.make("terngrad", {"preset": "paper"})
    assert (paper.method.clip, paper.route) == (2.5, "allreduce")
    mixed = Configuration.make("terngrad", {"preset": "paper", "clip": 0.0}, route="sharded")
    assert mixed == Configuration.make("terngrad", {})
    assert str(Configuration.make("scalecom", {"preset": "paper"}).memory) == "lowpass(share=0.1)"
    assert str(Configuration.make("gtopk", {"preset": "paper"}).granularity) == "model"
    assert str(Configuration.make("nuqsgd", {"preset": "paper"}).granularity) == "block:8192"
    with pytest.raises(gradwire.ConfigurationError, match="preset='author' is not known; choose 'paper'"):
        Configuration.make("terngrad", {"preset": "author"})
    with pytest.raises(gradwire.ConfigurationError, match="with a method's name"):
        Configuration.make(gradwire.methods.TernGrad(), {"preset": "paper"})
    with pytest.raises(gradwire.ConfigurationError, match="has no option 'preset'"):
        gradwire.methods.make("terngrad", {"preset": "paper"})
    nine_bits = gradwire.roundtrip(torch.ones(100), "natural", bits=9)
    assert gradwire.roundtrip(torch.ones(100), "natural", preset="paper").wire_bytes == nine_bits.wire_bytes


def test_analysis_has_the_bounds_of_the_paper() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = {"a": torch.randn(30, 40, generator=generator), "b": 10 * torch.randn(500, generator=generator)}
    exact = gradwire.analyze({**gradients, "frozen": None}, "dense", draws=1)
    assert exact.layer_wise_bound == exact.entire_model_bound == 2
    assert exact.layer_wise_error == exact.entire_model_error == 0
    random = gradwire.analyze(gradients, "randomk", ratio=0.1, draws=200)
    for layer in random.layers:
        assert layer.worker_omega == pytest.approx(9, rel=0.15)
        assert layer.error == pytest.approx(9, rel=0.15)
    assert random.layer_wise_bound <= random.entire_model_bound
    both = gradwire.analyze(gradients, "topk", ratio=0.1, owner="sign", draws=1)
    assert all(layer.owner_omega < 0 for layer in both.layers)
    assert both.entire_model_error is not None
    with pytest.raises(gradwire.ConfigurationError, match="not zero"):
        gradwire.analyze({"a": torch.zeros(3)}, "topk")


def test_a_method_to_analyse_may_be_text() -> None:
    gradients = {"a": torch.randn(30, 40, generator=torch.Generator().manual_seed(0))}
    assert gradwire.analyze(gradients, "topk:ratio=0.1") == gradwire.analyze(gradients, "topk", ratio=0.1)
    with pytest.raises(ConfigurationError, match=r"came with ratio=0\.2; write it with the method or give it"):
        gradwire.analyze(gradients, "topk:ratio=0.1", ratio=0.2)
    with pytest.raises(ConfigurationError, match="memory is chosen where a method is attached"):
        gradwire.analyze(gradients, "topk:memory=ef21")
    with pytest.raises(ConfigurationError, match=r"draws=1\.5 is out of range; choose a whole number"):
        gradwire.analyze(gradients, "topk", draws=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [-1, 0.5, "1"])
def test_a_roundtrip_of_no_step_is_told(step: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"step=.* is out of range; choose a whole number of steps, from 0"):
        gradwire.roundtrip(torch.ones(1000), "qsgd", step=step)


@pytest.mark.parametrize("vectors", ["no", None, 0])
def test_a_policy_says_yes_or_no_to_vectors(vectors: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"vectors=.* is no answer; choose True or False"):
        gradwire.DensePolicy(vectors=vectors)


@pytest.mark.parametrize(
    ("gradients", "told"),
    [
        ([torch.ones(3)], "gradients is a list; give them by name"),
        ({"a": [1.0]}, "gradient of 'a' is of list; give float32"),
        ({"a": torch.ones(3, dtype=torch.int64)}, "gradient of 'a' is of torch.int64"),
        ({"a": torch.ones(3).to_sparse()}, "gradient of 'a' has layout torch.sparse_coo"),
        ({"a": torch.ones(3, device="meta")}, "gradient of 'a' is on the meta device"),
    ],
)
def test_what_cannot_be_analysed_is_told(gradients: Any, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        gradwire.analyze(gradients, "topk")
