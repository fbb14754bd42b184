"""What is found by name, of every kind: one law, and a user's own by name in a round trip."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.codecs import index, quantize
from gradwire.codecs.index.names import codings as index_codings
from gradwire.codecs.quantize import Quantiser, values
from gradwire.codecs.quantize.names import codecs
from gradwire.errors import ConfigurationError
from gradwire.granularity import Granularity, granularities
from gradwire.kernels import codes
from gradwire.memory.names import memories
from gradwire.methods.registry import methods
from gradwire.registry import Registry

REGISTRIES: dict[str, Registry[Any]] = {
    "method": methods,
    "memory": memories,
    "codec": codecs,
    "value coding": values.codings,
    "index coding": index_codings,
    "granularity": granularities,
}
NUMBERED = ("codec", "value coding", "granularity")
VECTOR = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """What a test registers is known in that test only."""
    before = {kind: dict(registry._entries) for kind, registry in REGISTRIES.items()}
    yield
    for kind, registry in REGISTRIES.items():
        registry._entries = before[kind]


@pytest.mark.parametrize("kind", REGISTRIES)
def test_a_registry_finds_lists_and_refuses(kind: str) -> None:
    registry = REGISTRIES[kind]
    usual = registry.names()
    assert len(set(usual)) == len(usual) > 2

    def mine() -> str:
        return "mine"

    assert registry.register("mine")(mine) is mine
    assert registry.get("mine") is mine
    assert registry.make("mine") == "mine"
    assert set(registry.names()) == {*usual, "mine"}
    assert registry.register("mine")(mine) is mine, "a definition may be run again"
    for name in ("mine", usual[0], usual[-1]):
        with pytest.raises(ConfigurationError, match=f"^{kind} '{name}' is .* already; choose another name"):
            registry.register(name)(lambda: None)
    assert registry.get("mine") is mine

    with pytest.raises(ConfigurationError) as caught:
        registry.get("minee")
    assert str(caught.value).startswith(f"{kind} 'minee' is not known; did you mean 'mine'")
    assert all(repr(name) in str(caught.value) for name in (*usual, "mine"))
    for other in (5, None, "mine:3", "mine:", ""):
        with pytest.raises(ConfigurationError, match=f"^{kind} {other!r} is not known; "):
            registry.get(other)


@pytest.mark.parametrize("kind", REGISTRIES)
def test_names_with_a_number(kind: str) -> None:
    registry = REGISTRIES[kind]
    registry.register("wide:N")(lambda number: 10 * number)
    assert registry.make("wide:12") == 120
    for other in ("wide", "wide:", "wide:N", "wide:-1", "wide:²"):
        with pytest.raises(ConfigurationError, match=f"{kind} '{other}' is not known; "):
            registry.make(other)
    with pytest.raises(ConfigurationError, match=f"{kind} 'wid:4' is not known; did you mean 'wide:4'"):
        registry.make("wid:4")
    assert kind not in NUMBERED or any(name.endswith(":N") for name in registry.names())


def test_a_method_of_ones_own_by_name() -> None:
    @gradwire.methods.register("half")
    @dataclass(frozen=True, kw_only=True)
    class Half(gradwire.methods.CodecMethod):
        """A few levels."""

        citation = "nobody"
        bits: int = 2

        def codec(self) -> Quantiser:
            """Levels."""
            return Quantiser(codes.QSGD(self.bits))

    assert "half" in gradwire.methods.names()
    mine = gradwire.roundtrip(VECTOR, "half", bits=4)
    assert torch.equal(mine.decoded, gradwire.roundtrip(VECTOR, "qsgd", granularity="layer").decoded)
    with pytest.raises(ConfigurationError, match="method 'hlaf' is not known; did you mean 'half'"):
        gradwire.roundtrip(VECTOR, "hlaf")


def test_a_memory_of_ones_own_by_name() -> None:
    @gradwire.memory.register("faded")
    class Faded(gradwire.memory.Residual):
        """Error feedback that fades."""

        def __init__(self) -> None:
            super().__init__(beta=0.5)

    same = gradwire.roundtrip(VECTOR, "topk", memory=gradwire.memory.Residual(beta=0.5))
    assert torch.equal(gradwire.roundtrip(VECTOR, "topk", memory="faded").decoded, same.decoded)
    with pytest.raises(ConfigurationError, match="memory 'fadde' is not known; did you mean 'faded'"):
        gradwire.roundtrip(VECTOR, "topk", memory="fadde")


def test_codings_of_ones_own_by_name() -> None:
    quantize.register("levels:N")(lambda bits: Quantiser(codes.QSGD(bits)))
    index.register("plain")(index.Raw)
    values.register("half")(lambda: values.FloatValues(torch.float16))
    sparse = {"ratio": 0.1, "memory": "none"}
    mine = gradwire.roundtrip(VECTOR, "topk", values="half", indices="plain", **sparse)
    assert mine.wire_bytes == gradwire.roundtrip(VECTOR, "topk", values="fp16", indices="raw", **sparse).wire_bytes
    assert gradwire.roundtrip(VECTOR, "topk", values="levels:8", **sparse).decoded.count_nonzero() > 100
    owned = gradwire.roundtrip(VECTOR, "topk", owner="levels:8", route="sharded", **sparse)
    assert owned.decoded.count_nonzero() > 100


def test_a_granularity_of_ones_own_by_name() -> None:
    gradwire.granularity.register("row")(lambda: Granularity("row", length=lambda shape: math.prod(shape[1:])))
    mine = gradwire.roundtrip(VECTOR, "topk", granularity="row", ratio=0.1, memory="none").decoded
    assert (mine.count_nonzero(1) == 3).all()
    assert torch.equal(mine, gradwire.roundtrip(VECTOR, "topk", granularity="block:30", ratio=0.1).decoded)
    with pytest.raises(ConfigurationError, match="acpsgd cannot work at granularity='row' because"):
        gradwire.roundtrip(VECTOR, "acpsgd", granularity="row")
    gradwire.granularity.register("none")(lambda: Granularity("none", length=lambda shape: 0))
    with pytest.raises(ConfigurationError, match="granularity='none' gives 0 elements to a segment of shape"):
        gradwire.roundtrip(VECTOR, "topk", granularity="none")


def test_a_codec_is_a_value_coding() -> None:
    codec = Quantiser(codes.Sign())
    assert values.parse(codec) == values.parse("sign") == values.CodedValues(codec)


def test_a_maker_may_say_no() -> None:
    def never() -> Tensor:
        raise ConfigurationError("not here")

    gradwire.memory.register("never")(never)
    with pytest.raises(ConfigurationError, match="not here"):
        gradwire.roundtrip(VECTOR, "topk", memory="never")
