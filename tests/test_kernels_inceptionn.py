import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codec_checks import check_compiled_once
from gradwire.errors import PayloadError
from gradwire.kernels import cpu, reference
from test_kernels import floats, gradients, normal, same

bounds = pytest.mark.parametrize("bound", [1, 2, 7, 10, 13, 14])


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    cpu.warm_up()


def sent(values: Tensor, bound: int) -> tuple[Tensor, int]:
    """What comes back, and in how many bytes; the same from both, nothing written beyond the bytes used."""
    payloads = torch.full((2, cpu.inceptionn_bytes(values.numel()) + 4), 0xA5, dtype=torch.uint8)
    used = [
        kernels.inceptionn_encode(values, bound, payload[:-4])
        for kernels, payload in zip((cpu, reference), payloads, strict=True)
    ]
    assert used[0] == used[1]
    assert used[0] % 4 == 0
    assert same(*payloads)
    assert (payloads[:, used[0] :] == 0xA5).all()
    outs = torch.full((2, values.numel()), 7.0)
    cpu.inceptionn_decode(payloads[0, : used[0]], bound, outs[0])
    reference.inceptionn_decode(payloads[0, : used[0]], bound, outs[1])
    assert same(*outs)
    return outs[0], used[0]


@gradients
@bounds
def test_errors_are_below_the_bound(gradient: Tensor, bound: int) -> None:
    values = gradient * 0.1
    out, _ = sent(values, bound)
    finite = values.isfinite()
    assert ((out - values)[finite].abs() < 2.0**-bound).all()
    assert same(out[~finite], values[~finite])
    assert (out[finite].abs() <= values[finite].abs()).all()


@settings(max_examples=150, deadline=None)
@given(values=st.lists(floats | st.floats(-1, 1, width=32), max_size=70), bound=st.integers(1, 14))
def test_any_values(values: list[float], bound: int) -> None:
    sent(torch.tensor(values, dtype=torch.float32), bound)


def test_tags_and_sizes() -> None:
    values = torch.tensor([1.0, -2.5, 0.75, -(2.0**-5), 2.0**-6, 2.0**-10, -(2.0**-11), 0.0])
    out, used = sent(values, 10)
    assert out.tolist() == [1.0, -2.5, 0.75, -(2.0**-5), 2.0**-6, 2.0**-10, 0.0, 0.0]
    assert used == 4 + 2 * 4 + 2 * 2 + 2 * 1 + 2
    assert sent(torch.zeros(1000), 10)[1] == 252
    assert sent(torch.zeros(0), 10)[1] == 0


@settings(max_examples=200, deadline=None)
@given(data=st.data(), count=st.integers(0, 20))
def test_any_bytes_are_read_or_refused_alike(data: st.DataObject, count: int) -> None:
    content = data.draw(st.binary(max_size=40))
    payload = torch.tensor(list(content), dtype=torch.uint8)
    if data.draw(st.booleans()):
        full = torch.zeros(cpu.inceptionn_bytes(count), dtype=torch.uint8)
        payload = full[: cpu.inceptionn_encode(normal()[:count], 10, full)].clone()
        payload[data.draw(st.integers(0, max(len(payload) - 1, 0))) :][:1] ^= data.draw(st.integers(0, 255))
    outcomes = []
    for kernels in (cpu, reference):
        memory = torch.full((count + 2,), 7.0)
        try:
            kernels.inceptionn_decode(payload, 10, memory[1:-1])
        except PayloadError:
            assert (memory == 7).all()
            outcomes.append(None)
        else:
            assert memory[0] == memory[-1] == 7
            outcomes.append(memory)
    assert (outcomes[0] is None) == (outcomes[1] is None)
    if outcomes[0] is not None:
        assert same(*outcomes)


@pytest.mark.parametrize("kernels", [cpu, reference])
@pytest.mark.parametrize("bound", [0, -1, 15])
def test_bounds_out_of_range(kernels: object, bound: int) -> None:
    payload = torch.zeros(cpu.inceptionn_bytes(4), dtype=torch.uint8)
    with pytest.raises(PayloadError, match="bound"):
        kernels.inceptionn_encode(torch.zeros(4), bound, payload)
    with pytest.raises(PayloadError, match="bound"):
        kernels.inceptionn_decode(payload[:4], bound, torch.zeros(4))


def test_compiled_once() -> None:
    check_compiled_once("inceptionn")
