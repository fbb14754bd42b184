"""What a lab takes, and what it refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gradwire import lab
from gradwire.errors import ConfigurationError, LabError
from gradwire.lab import launch

PYTHON = [sys.executable, "-S", "-c"]


IDLE = [*PYTHON, "import time; time.sleep(600)"]


class TestParseRate:
    @pytest.mark.parametrize(
        ("text", "rate"),
        [
            ("1gbit", 1_000_000_000),
            ("100mbit", 100_000_000),
            ("2.5 Gbit", 2_500_000_000),
            ("1500kbit", 1_500_000),
            ("1000000bit", 1_000_000),
        ],
    )
    def test_reads(self, text: str, rate: int) -> None:
        assert lab.parse_rate(text) == rate

    @pytest.mark.parametrize(
        "text", ["", "fast", "1", "1gb", "-1gbit", "1e3mbit", "gbit", "nan mbit", "\u0661gbit", 1000]
    )
    def test_refuses_what_is_no_rate(self, text: str) -> None:
        with pytest.raises(ConfigurationError, match=r"is not a rate: .*write a number and one of bit") as caught:
            lab.parse_rate(text)
        assert repr(text) in str(caught.value)

    @pytest.mark.parametrize("text", ["0gbit", "999kbit", "101gbit"])
    def test_refuses_what_no_lab_can_shape(self, text: str) -> None:
        with pytest.raises(ConfigurationError, match=f"'{text}' is .*; give 1mbit to 100gbit"):
            lab.parse_rate(text)


@pytest.mark.parametrize("rate", ["1mbit", "100mbit", "1gbit", "10gbit", "100gbit"])
def test_a_segment_and_the_headers_of_its_frames_fit_the_bucket(rate: str) -> None:
    shape = lab.Shape(lab.parse_rate(rate))
    frames = -(-shape.segment_bytes // 1448)
    assert 1514 <= shape.segment_bytes + frames * 66 <= shape.burst_bytes


def test_it_imports_no_torch() -> None:
    program = "import sys, gradwire.lab; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


class TestArguments:
    @pytest.mark.parametrize("workers", [0, -1, 251, True, 2.0, "2"])
    def test_workers(self, workers: int) -> None:
        with pytest.raises(ConfigurationError, match=rf"workers is {workers!r}: .* from 1 to 250"):
            lab.Lab(workers=workers, rate=None)

    def test_rate(self) -> None:
        with pytest.raises(ConfigurationError, match="'quick'"):
            lab.Lab(workers=2, rate="quick")

    @pytest.mark.parametrize("sites", [0, 3, True, "2"])
    def test_sites(self, sites: int) -> None:
        with pytest.raises(ConfigurationError, match=f"sites is {sites!r}: give a divisor of the number of workers, 4"):
            lab.Lab(workers=4, rate="1gbit", sites=sites, between="100mbit")

    @pytest.mark.parametrize(
        ("rate", "sites", "between"), [("1gbit", 2, None), ("1gbit", 1, "1gbit"), (None, 2, "1gbit")]
    )
    def test_what_goes_with_sites(self, rate: str | None, sites: int, between: str | None) -> None:
        with pytest.raises(ConfigurationError, match=f"sites={sites}, between={between!r} .* do not go together"):
            lab.Lab(workers=4, rate=rate, sites=sites, between=between)

    def test_a_lab_must_be_open_to_run(self) -> None:
        closed = lab.Lab(workers=1, rate=None)
        with pytest.raises(LabError, match="not open"):
            closed.run(IDLE)
        with closed:
            pass
        with pytest.raises(LabError, match="not open"):
            closed.run(IDLE)

    def test_of_run(self) -> None:
        with lab.Lab(workers=1, rate=None) as opened:
            with pytest.raises(ConfigurationError, match="timeout is 0"):
                opened.run(IDLE, timeout=0)
            with pytest.raises(ConfigurationError, match="silence is -1"):
                opened.run(IDLE, silence=-1)
            with pytest.raises(ConfigurationError, match="argv is 'ls'"):
                opened.run("ls")
            with pytest.raises(ConfigurationError, match="grace is -1"):
                opened.run(IDLE, grace=-1)
            with pytest.raises(LabError, match=r"cannot start worker 0 as .*no-such-command"):
                opened.run(["/no-such-command"])
            with pytest.raises(LabError, match="open already"):
                opened.__enter__()

    def test_a_worker_knows_its_interface(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        with pytest.raises(LabError, match="GLOO_SOCKET_IFNAME is not set"):
            lab.interface_counters()
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "wire77")
        with pytest.raises(LabError, match=r"no interface 'wire77' here: this network has .*lo"):
            lab.interface_counters()


def test_no_one_takes_the_reply_that_an_interrupted_request_left(monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    with launch.KeeperClient() as keeper:
        with monkeypatch.context() as twice:
            twice.setattr(launch, "receive_message", interrupted)
            twice.setattr(keeper, "close", interrupted)
            with pytest.raises(KeyboardInterrupt):
                keeper.request("port", namespace=0, address="127.0.0.1")
        with pytest.raises(LabError, match="has ended"):
            keeper.request("counters")
