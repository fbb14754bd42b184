"""What is found by name, of every kind: one law, and a user's own by name in a round trip."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradwire
from gradwire.codecs import index, quantize
from gradwire.codecs.index.names import codings as index_codings
from gradwire.codecs.quantize import Quantiser, values
from gradwire.codecs.quantize.names import codecs
from gradwire.errors import ConfigurationError
from gradwire.granularity import Granularity, granularities
from gradwire.kernels import codes
from gradwire.layout import Block
from gradwire.memory.names import memories
from gradwire.methods.registry import methods
from gradwire.registry import Registry
from gradwire.routes import Operator, gather
from gradwire.routes.names import routes
from pool import Pool

REGISTRIES: dict[str, Registry[Any]] = {
    "method": methods,
    "memory": memories,
    "codec": codecs,
    "value coding": values.codings,
    "index coding": index_codings,
    "granularity": granularities,
    "route": routes,
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
    assert len(set(usual)) == len(usual) > 0

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
def test_a_name_that_nobody_could_ask_for_is_refused(kind: str) -> None:
    """Also a class in its place, as where the decorator was written without a name."""
    registry = REGISTRIES[kind]
    usual = registry.names()
    for name in ("", "my:own", ":N", "a,b", "a=1", "my own", 5, Quantiser):
        said = "'Quantiser'" if name is Quantiser else repr(name)
        message = f"^{kind} {said} could not be asked for; choose a name, as in reg"
        with pytest.raises(ConfigurationError, match=message):
            registry.register(name)  # type: ignore[arg-type]
    assert registry.names() == usual


@pytest.mark.parametrize(
    ("kind", "name"), [("method", "auto"), ("method", "recipe"), ("route", "sharded"), ("route", "allreduce")]
)
def test_a_name_that_means_something_else_already_is_refused(kind: str, name: str) -> None:
    """Where it would be asked for, what is registered would never be found."""
    with pytest.raises(ConfigurationError, match=f"^{kind} '{name}' could not be asked for; .*, and not '{name}'"):
        REGISTRIES[kind].register(name)


@pytest.mark.parametrize("kind", REGISTRIES)
def test_a_maker_that_returns_nothing_is_told(kind: str) -> None:
    """As where ``return`` was forgotten: None would stand for what is usual."""
    REGISTRIES[kind].register("mine")(lambda: None)
    with pytest.raises(ConfigurationError, match=rf"^{kind} 'mine' is .*<lambda>, which made None; have it return one"):
        REGISTRIES[kind].make("mine")


def test_a_codec_takes_no_name_of_a_value_coding() -> None:
    """Codecs are value codings, too: one of this name would take the place of what ``values="fp32"`` has meant."""
    with pytest.raises(ConfigurationError, match=r"^codec 'fp32' is .* already; choose another name"):
        quantize.register("fp32")(lambda: Quantiser(codes.QSGD(4)))
    assert isinstance(values.parse("fp32"), values.FloatValues)


@pytest.mark.parametrize("kind", REGISTRIES)
def test_names_with_a_number(kind: str) -> None:
    registry = REGISTRIES[kind]
    registry.register("wide:N")(lambda number: 10 * number)
    assert registry.make("wide:12") == 120
    for other in ("wide", "wide:", "wide:N", "wide:-1", "wide:²"):
        with pytest.raises(ConfigurationError, match=f"{kind} '{other}' is not known; ") as caught:
            registry.make(other)
        assert f"did you mean '{other}'" not in str(caught.value)
    with pytest.raises(ConfigurationError, match=f"{kind} 'wide:1e3' is not known; did you mean 'wide:N'"):
        registry.make("wide:1e3")
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
    gradwire.granularity.register("pair")(lambda: Granularity("pair", length=lambda shape: 2 * math.prod(shape[1:])))
    mine = gradwire.roundtrip(VECTOR, "topk", granularity="pair", ratio=0.1, memory="none").decoded
    assert (mine.unflatten(0, (-1, 2)).count_nonzero((1, 2)) == 6).all()
    assert torch.equal(mine, gradwire.roundtrip(VECTOR, "topk", granularity="block:60", ratio=0.1).decoded)
    with pytest.raises(ConfigurationError, match="acpsgd cannot work at granularity='pair' because"):
        gradwire.roundtrip(VECTOR, "acpsgd", granularity="pair")
    gradwire.granularity.register("none")(lambda: Granularity("none", length=lambda shape: 0))
    with pytest.raises(ConfigurationError, match="granularity='none' gives 0 elements to a segment of shape"):
        gradwire.roundtrip(VECTOR, "topk", granularity="none")


def test_a_route_of_ones_own_by_name(pool: Pool) -> None:
    """Rank 0 tells the others of the average, as a parameter server does."""
    pool.run(2, goes_by_a_server)


def goes_by_a_server() -> None:
    @gradwire.routes.register("server")
    def server(worker: Operator, owner: Operator | None, block: Block, gradient: Tensor, workers: int) -> Any:
        yield from gather(worker, owner, block, gradient, workers)
        gradient.copy_((yield gradwire.wire.Broadcast(gradient, 0)))

    found = []
    for route in ("gather", "server"):
        weight = torch.nn.Parameter(torch.zeros(40, 30))
        sync = gradwire.Synchronizer([("weight", weight)], "topk", route=route, ratio=0.1)
        weight.grad = VECTOR * (1 + dist.get_rank())
        sync.synchronize()
        found.append((weight.grad, sync.stats().wire_bytes))
        sync.close()
    assert torch.equal(found[0][0], found[1][0])
    assert (found[1][1] > found[0][1]) == (dist.get_rank() == 0), "whoever broadcasts sends more"
    with pytest.raises(ConfigurationError, match="topk cannot take route='sever'; its routes: gather, sharded"):
        gradwire.roundtrip(VECTOR, "topk", route="sever")
    with pytest.raises(ConfigurationError, match="powersgd cannot take route='server'"):
        gradwire.roundtrip(VECTOR, "powersgd", route="server")
    routes._entries.pop("server")


@pytest.mark.parametrize("name", gradwire.methods.names())
def test_rows_are_blocks_of_their_length(name: str) -> None:
    if "block" not in {each.partition(":")[0] for each in gradwire.methods.get(name).granularities}:
        with pytest.raises(ConfigurationError, match="cannot work at granularity='row'"):
            gradwire.roundtrip(VECTOR, name, granularity="row")
        return
    mine, same = (gradwire.roundtrip(VECTOR, name, granularity=scope) for scope in ("row", "block:30"))
    assert mine.wire_bytes == same.wire_bytes
    assert torch.equal(mine.decoded, same.decoded)
    whole, layer = (gradwire.roundtrip(VECTOR[0], name, granularity=scope) for scope in ("row", "layer"))
    assert torch.equal(whole.decoded, layer.decoded), "a vector is one row"


def test_a_codec_is_a_value_coding() -> None:
    codec = Quantiser(codes.Sign())
    assert values.parse(codec) == values.parse("sign") == values.CodedValues(codec)


def test_a_maker_may_say_no() -> None:
    def never() -> Tensor:
        raise ConfigurationError("not here")

    gradwire.memory.register("never")(never)
    with pytest.raises(ConfigurationError, match="not here"):
        gradwire.roundtrip(VECTOR, "topk", memory="never")
