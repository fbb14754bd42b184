import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_checks import check_compiled_once
from gradwire.errors import PayloadError
from gradwire.kernels import cpu, reference

trits = st.lists(st.one_of(st.just(121), st.integers(0, 242)), max_size=120)
runs = st.lists(st.tuples(st.integers(0, 242), st.integers(0, 40)), max_size=8)


def coded(values: list[int]) -> list[int]:
    source = torch.tensor(values, dtype=torch.uint8)
    outcomes = []
    for kernels in (cpu, reference):
        target = torch.full((len(values) + 1,), 0xA5, dtype=torch.uint8)
        room = len(values) // 2
        used = kernels.zero_runs_encode(source, target[:-1], room)
        assert target[-1] == 0xA5
        assert not target[used:room].any()
        outcomes.append(target[:used].tolist())
        back = torch.zeros_like(source)
        assert kernels.zero_runs_decode(target, used, back) == len(values)
        assert torch.equal(back, source)
    assert outcomes[0] == outcomes[1]
    return outcomes[0]


@settings(max_examples=100, deadline=None)
@given(values=trits, repeats=runs)
def test_trits_come_back(values: list[int], repeats: list[tuple[int, int]]) -> None:
    whole = values + [byte for first, zeros in repeats for byte in (first, *[121] * zeros)]
    assert len(coded(whole)) <= len(whole)


def test_runs_have_the_published_bytes() -> None:
    assert coded([121]) == [121]
    assert coded([121] * 2) == [243]
    assert coded([121] * 14) == [255]
    assert coded([121] * 15) == [255, 121]
    assert coded([121] * 30) == [255, 255, 243]
    assert coded([0, 121, 121, 242, 121]) == [0, 243, 242, 121]


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.one_of(st.integers(241, 255), st.just(121), st.integers(0, 255)), max_size=20), data=st.data()
)
def test_any_bytes_are_read_or_refused_alike(values: list[int], data: st.DataObject) -> None:
    source = torch.tensor(values, dtype=torch.uint8)
    size = sum(max(value - 241, 1) for value in values) if data.draw(st.booleans()) else data.draw(st.integers(0, 60))
    outcomes = []
    for kernels in (cpu, reference):
        memory = torch.full((size + 2,), 7, dtype=torch.uint8)
        try:
            read = kernels.zero_runs_decode(source, torch.tensor(len(source)), memory[1:-1])
        except PayloadError:
            assert (memory == 7).all()
            outcomes.append(None)
        else:
            assert memory[0] == memory[-1] == 7
            assert (memory[1 + read : -1] == 121).all()
            assert coded(memory[1 : 1 + read].tolist()) == values
            outcomes.append(memory.tolist())
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_what_no_encoder_writes_is_refused(kernels: object) -> None:
    for values, size in (([121, 121], 2), ([243, 121], 3), ([244, 255], 17), ([255], 13), ([1], 0)):
        source, used = torch.tensor(values, dtype=torch.uint8), torch.tensor(len(values))
        with pytest.raises(PayloadError):
            kernels.zero_runs_decode(source, used, torch.zeros(size, dtype=torch.uint8))
    with pytest.raises(PayloadError, match="243"):
        kernels.zero_runs_encode(torch.tensor([3, 243], dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8), 2)


def test_compiled_once() -> None:
    check_compiled_once("zero_runs")
