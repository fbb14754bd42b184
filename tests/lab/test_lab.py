from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

from gradwire import lab
from gradwire.errors import LabError
from gradwire.lab.keeper import receive_message, send_message

shaped = pytest.mark.skipif(not lab.availability().possible, reason=lab.availability().reason)


PYTHON = [sys.executable, "-S", "-c"]


IDLE = [*PYTHON, "import time; time.sleep(600)"]


# Every worker starts a child and reports both and its network, then waits to be ended.
REPORTS_AND_WAITS = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "600"], start_new_session=os.environ["RANK"] == "0")
print(os.getpid(), child.pid, os.readlink("/proc/self/ns/net"), flush=True)
time.sleep(600)
"""


OPENS_A_LAB = f"""
import sys
from gradwire.lab import Lab
def tell(rank, line):
    print(line, flush=True)
with Lab(workers=2, rate="1gbit") as lab:
    lab.run([sys.executable, "-S", "-c", {REPORTS_AND_WAITS!r}], on_line=tell)
"""


TRANSFERS = """
import os, socket, sys
from gradwire.lab import interface_counters
rank, size = int(os.environ["RANK"]), int(sys.argv[1])
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
before = interface_counters()
if rank == 0:
    with socket.create_server(address) as server:
        connection, _ = server.accept()
        with connection:
            left = size
            while left:
                left -= len(connection.recv(min(left, 1 << 16)))
            connection.sendall(b"!")
else:
    while True:
        try:
            connection = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            pass
    with connection:
        connection.sendall(bytes(size))
        connection.recv(1)
spent = interface_counters() - before
print(spent.tx_bytes, spent.rx_bytes, spent.tx_packets, spent.rx_packets)
"""


MOST_HEADERS = 14 + 20 + 60
"""Bytes of a packet that are none of TCP's payload, at most: Ethernet, IP, and TCP with all options there can be."""


SENDS = """
import os, socket, sys, time
rank, sender, receiver, size = map(int, (os.environ["RANK"], *sys.argv[1:]))
address = f"10.77.0.{receiver + 1}", 7000
if rank == receiver:
    with socket.create_server(address) as server, server.accept()[0] as connection:
        while connection.recv(1 << 16):
            pass
while rank == sender:
    try:
        with socket.create_connection(address) as connection:
            connection.sendall(bytes(size))
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
"""


ALL_REDUCES = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(total)
print(total.unique().tolist())
dist.destroy_process_group()
"""


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> str:
    """What is in the environment of this test's processes and of no other: labs beside it come and go."""
    monkeypatch.setenv("OPENED_BY", uuid.uuid4().hex)
    return f"OPENED_BY={os.environ['OPENED_BY']}"


def holders(namespace: str, owner: str) -> list[str]:
    """An owner's processes that are in a network namespace or hold it open.

    Another's may be in one of the same name: the kernel gives the number of one that is gone to the next.
    """
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if owner.encode() in (process / "environ").read_bytes().split(b"\0"):
                links = [process / "ns/net", *(process / "fd").iterdir()]
                found += [process.name for link in links if os.readlink(link) == namespace]
        except OSError:
            continue
    return found


def assert_gone_soon(reports: list[list[str]], interfaces: set[str], owner: str) -> None:
    pids = [int(pid) for report in reports for pid in report[:2]]

    def held() -> list[tuple[str, list[str]]]:
        found = [(report[2], holders(report[2], owner)) for report in reports]
        return [(namespace, by) for namespace, by in found if by]

    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and (any(map(is_running, pids)) or held()):
        time.sleep(0.02)
    assert not [pid for pid in pids if is_running(pid)]
    assert not held()
    assert set(os.listdir("/sys/class/net")) == interfaces


class TestLoopback:
    def test_runs_workers_with_what_torch_distributed_needs(self) -> None:
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "MORE"]
        program = f"import os; print([os.environ[name] for name in {names}]); print('é', end='')"
        heard: list[tuple[int, str]] = []
        with lab.Lab(workers=2, rate=None) as opened:
            result = opened.run(
                [*PYTHON, program], env={"MORE": "x"}, on_line=lambda rank, line: heard.append((rank, line))
            )
            with pytest.raises(LabError, match="rate=None has no interfaces"):
                opened.counters()
            with pytest.raises(LabError, match="rate=None has no interfaces"):
                opened.site_counters()
        assert result.outputs == [f"{[str(r), str(r), '2', '2', '127.0.0.1', 'lo', 'x']}\né" for r in range(2)]
        for rank in range(2):
            assert "".join(line for told, line in heard if told == rank) == result.outputs[rank].replace("\n", "")

    def test_a_crash_ends_the_others_and_is_told(self) -> None:
        program = """
            import os, sys, time
            if os.environ["RANK"] == "1":
                sys.stderr.write("the tale of woe")
                sys.exit(7)
            print(os.getpid(), flush=True)
            time.sleep(600)
        """
        pids: list[int] = []
        with lab.Lab(workers=3, rate=None) as opened:
            with pytest.raises(LabError, match=r"(?s)worker 1 of 3 exited with code 7.*the tale of woe"):
                opened.run([*PYTHON, textwrap.dedent(program)], on_line=lambda _, line: pids.append(int(line)))
            assert not any(map(is_running, pids))
            assert opened.run(["echo", "on"]).outputs == ["on\n"] * 3

    def test_a_signal_is_named(self) -> None:
        program = "import os; os.kill(os.getpid(), 9)"
        with (
            lab.Lab(workers=1, rate=None) as opened,
            pytest.raises(LabError, match=r"worker 0 of 1 was killed by SIGKILL.*nothing to its standard error"),
        ):
            opened.run([*PYTHON, program])

    def test_a_worker_that_ignores_sigterm_ends_too_when_time_is_up(self) -> None:
        program = """
            import signal, time
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        """
        with (
            lab.Lab(workers=2, rate=None) as opened,
            pytest.raises(LabError, match=r"not finish within 0\.5 s: .* of rank 0, 1; "),
        ):
            opened.run([*PYTHON, textwrap.dedent(program)], timeout=0.5, grace=0.2)

    def test_workers_that_say_nothing_for_too_long_are_ended(self) -> None:
        program = "import time; [(print(i, flush=True), time.sleep(0.1)) for i in range(5)]; time.sleep(600)"
        heard: list[str] = []
        with (
            lab.Lab(workers=1, rate=None) as opened,
            pytest.raises(LabError, match=r"said nothing for 5 s: .* of rank 0; "),
        ):
            opened.run([*PYTHON, program], timeout=300, silence=5, on_line=lambda rank, line: heard.append(line))
        assert heard == ["0", "1", "2", "3", "4"]

    def test_standard_error_is_kept_apart(self) -> None:
        heard: list[tuple[int, str]] = []
        with lab.Lab(workers=2, rate=None) as opened:
            result = opened.run(
                ["sh", "-c", "echo out; echo err $RANK >&2"],
                timeout=float("inf"),
                on_error_line=lambda rank, line: heard.append((rank, line)),
            )
        assert result.outputs == ["out\n"] * 2
        assert sorted(heard) == [(0, "err 0"), (1, "err 1")]

    def test_one_run_at_a_time(self) -> None:
        with lab.Lab(workers=1, rate=None) as opened, pytest.raises(LabError, match="running a command already"):
            opened.run(["echo", "on"], on_line=lambda *_: opened.run(["echo", "too"]))

    def test_what_a_callback_raises_comes_through(self) -> None:
        def refuse(rank: int, line: str) -> None:
            raise KeyError(line)

        with lab.Lab(workers=2, rate=None) as opened:
            with pytest.raises(KeyError, match="hello"):
                opened.run([*PYTHON, "import time; print('hello'); time.sleep(600)"], on_line=refuse)
            assert opened.run(["echo", "on"]).outputs == ["on\n"] * 2

    def test_the_death_of_its_keeper_is_told(self) -> None:
        program = "import os, time; print(os.getppid(), flush=True); time.sleep(600)"
        with lab.Lab(workers=1, rate=None) as opened:
            with pytest.raises(LabError, match="the process that holds the lab"):
                opened.run([*PYTHON, program], on_line=lambda _, line: os.kill(int(line), signal.SIGKILL))
            with pytest.raises(LabError, match="open a new lab"):
                opened.run(["true"])

    def test_long_output_of_a_quick_worker_is_whole(self) -> None:
        with lab.Lab(workers=2, rate=None) as opened:
            outputs = opened.run([*PYTHON, "print('x' * 500_000); print('y' * 500_000)"]).outputs
        assert outputs == ["x" * 500_000 + "\n" + "y" * 500_000 + "\n"] * 2


@shaped
class TestShaped:
    @pytest.mark.parametrize("rate", ["100mbit", "1gbit"])
    def test_counters_agree_with_what_was_sent(self, rate: str) -> None:
        size = 4_000_000
        with lab.Lab(workers=2, rate=rate) as opened:
            result = opened.run([sys.executable, "-c", TRANSFERS, str(size)])
            outer = opened.counters()
        inner = [lab.InterfaceCounters(*map(int, output.split())) for output in result.outputs]
        # On a busy machine segments are smaller and attempts to connect more, so packets count, and not a share.
        assert size < inner[1].tx_bytes <= size + MOST_HEADERS * inner[1].tx_packets
        assert size < inner[0].rx_bytes <= size + MOST_HEADERS * inner[0].rx_packets
        assert inner[1].rx_bytes <= MOST_HEADERS * inner[1].rx_packets
        assert size < outer[1].tx_bytes <= size + MOST_HEADERS * outer[1].tx_packets
        assert size < outer[0].rx_bytes <= size + MOST_HEADERS * outer[0].rx_packets
        assert outer[0].rx_packets > size // 65536

    @pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (0, 2), (5, 3), (4, 5)])
    def test_what_leaves_a_site_is_counted_on_its_link(self, sender: int, receiver: int) -> None:
        size = 2_000_000
        with lab.Lab(workers=6, rate="1gbit", sites=3, between="100mbit") as opened:
            assert opened.sites is not None
            opened.run([*PYTHON, SENDS, str(sender), str(receiver), str(size)])
            workers, sites = opened.counters(), opened.site_counters()
        assert workers[sender].tx_bytes > size
        assert workers[receiver].rx_bytes > size
        for site, each in enumerate(sites):
            from_here, to_here = (sender // 2 == site), (receiver // 2 == site)
            assert (each.tx_bytes > size) == (from_here and not to_here)
            assert (each.rx_bytes > size) == (to_here and not from_here)

    def test_one_place_has_no_links_to_others(self) -> None:
        with lab.Lab(workers=1, rate="1gbit") as opened:
            assert opened.site_counters() == []

    def test_two_labs_at_once(self) -> None:
        size = 1_000_000
        with lab.Lab(workers=2, rate="1gbit") as first, lab.Lab(workers=3, rate="1gbit") as second:
            first.run([sys.executable, "-c", TRANSFERS, str(size)])
            assert first.counters()[1].tx_bytes > size
            assert [worker.tx_bytes < 10_000 for worker in second.counters()] == [True] * 3
            assert second.run(["echo", "on"]).outputs == ["on\n"] * 3

    def test_counters_can_be_read_while_it_runs(self) -> None:
        read: list[int] = []
        with lab.Lab(workers=2, rate="1gbit") as opened:
            opened.run(["echo", "on"], on_line=lambda *_: read.append(len(opened.counters())))
        assert read == [2, 2]

    def test_leaving_it_leaves_nothing(self, owner: str) -> None:
        interfaces = set(os.listdir("/sys/class/net"))
        reports: list[list[str]] = []

        def hear(rank: int, line: str) -> None:
            reports.append(line.split())
            if len(reports) == 2:
                raise EOFError

        with pytest.raises(EOFError), lab.Lab(workers=2, rate="1gbit") as opened:
            opened.run([*PYTHON, REPORTS_AND_WAITS], on_line=hear)
        assert_gone_soon(reports, interfaces, owner)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    def test_a_signal_to_who_opened_it_leaves_nothing(self, number: signal.Signals, owner: str) -> None:
        interfaces = set(os.listdir("/sys/class/net"))
        command = [sys.executable, "-c", OPENS_A_LAB]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell that starts tests in the background has them ignore SIGINT, and so would their children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            reports = [process.stdout.readline().split() for _ in range(2)]
            assert all(holders(report[2], owner) for report in reports)
            process.send_signal(number)
            errors = process.stderr.read()
        assert process.returncode == -number
        assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
        assert_gone_soon(reports, interfaces, owner)

    @pytest.mark.usefixtures("begun_quickly")
    def test_gloo_runs_in_it(self) -> None:
        for sites, between in ((1, None), (3, "100mbit")):
            with lab.Lab(workers=3, rate="1gbit", sites=sites, between=between) as opened:
                result = opened.run([sys.executable, "-c", ALL_REDUCES], timeout=60)
            assert result.outputs == ["[6.0]\n"] * 3


def test_a_side_that_goes_without_reading_is_gone() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        send_message(ours, {"unread": True})
        theirs.close()
        assert receive_message(ours) is None
