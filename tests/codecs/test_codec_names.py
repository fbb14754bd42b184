import pytest
import torch

import gradwire
from gradwire.codecs import quantize
from gradwire.codecs.quantize import Quantiser, values
from gradwire.errors import ConfigurationError
from gradwire.kernels import codes
from gradwire.layout import Block, Granularity, Slot
from gradwire.memory import NONE

NAMES = {
    "sign": Quantiser(codes.Sign()),
    "vote": Quantiser(codes.Vote()),
    "onebit": Quantiser(codes.OneBit()),
    "dynamic": Quantiser(codes.Dynamic()),
    "natural": Quantiser(codes.Natural(8)),
    "natural:9": Quantiser(codes.Natural(9)),
    "terngrad": Quantiser(codes.TernGrad()),
    "qsgd:2": Quantiser(codes.QSGD(2), 512),
    "nearest:4": Quantiser(codes.QSGD(4, nearest=True), 512),
    "quantile:16": quantize.Quantile(16),
    "3lc": quantize.ZeroRuns(),
    "exponent": Quantiser(codes.Exponent()),
}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_a_codec(name: str) -> None:
    codec = quantize.parse(name)
    assert codec == NAMES[name]
    assert quantize.parse(codec) is codec
    coding = values.parse(name)
    assert coding == values.CodedValues(codec)
    block = Block.cut([Slot("weight", (1000,), 0)], Granularity("layer"))
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    payload = torch.empty(codec.payload_bytes(block), dtype=torch.uint8)
    codec.encode(block, gradient, NONE, payload, 0)
    out = torch.empty(1000)
    codec.decode(block, payload[None], out, 1.0)
    assert torch.dot(out, gradient) > 0


@pytest.mark.parametrize("name", NAMES)
def test_every_name_codes_the_values_of_a_sparse_method(name: str) -> None:
    vector = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    decoded = gradwire.roundtrip(vector, "topk", ratio=0.1, values=name, memory="none").decoded
    assert decoded.isfinite().all()
    assert 0 < decoded.count_nonzero() <= 500


@pytest.mark.parametrize(
    "name", ["", "signs", "sign:1", "qsgd", "qsgd:", "qsgd:-4", "qsgd:²", "qsgd:N", "nearest", "3lc:2"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"codec .* is not known; .*all of them: 'sign'"):
        quantize.parse(name)
    with pytest.raises(ConfigurationError, match=r"value coding .* is not known; .*all of them: 'fp32', .*'sign'"):
        values.parse(name)


def test_values_of_both_signs_have_no_mean_by_name() -> None:
    """1 and -1 have 0, and all of them would stay in a residual for ever."""
    with pytest.raises(gradwire.ConfigurationError, match="mean"):
        gradwire.roundtrip(torch.tensor([1.0, -1.0]).repeat(50), "topk", ratio=0.1, values="mean")


def test_other_types_are_refused() -> None:
    for wrong in (4, None, object()):
        with pytest.raises(ConfigurationError):
            quantize.parse(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError):
            values.parse(wrong)  # type: ignore[arg-type]


def test_options_out_of_range_say_so() -> None:
    with pytest.raises(ConfigurationError, match="bits=3"):
        quantize.parse("qsgd:3")
    with pytest.raises(ConfigurationError, match="bits=7"):
        values.parse("natural:7")


@pytest.mark.parametrize("name", ["natural", "onebit", "terngrad", "3lc"])
def test_a_codec_is_what_the_method_of_its_name_has(name: str) -> None:
    assert quantize.parse(name) == gradwire.methods.get(name)().codec()
