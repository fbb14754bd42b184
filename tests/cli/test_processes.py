"""A command as a process: what interrupts it, what it ends with, and output that has no room."""

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from gradwire import cli

GRADWIRE = [sys.executable, "-m", "gradwire"]


def test_interrupt_ends_the_workers_and_exits_130(tmp_path):
    out = tmp_path / "results"
    process = subprocess.Popen(
        [
            *GRADWIRE,
            "bench",
            "train",
            "--workers=2",
            "--link=none",
            "--dataset=digits",
            "--steps=100000",
            f"--out={out}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        # A shell that starts tests in the background has them ignore the signal, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 30
        while len(workers := _workers_in(tmp_path)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(workers) == 2
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == cli.INTERRUPTED
    assert err.strip().endswith("interrupted")
    assert not _workers_in(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_interrupt_while_it_is_imported_exits_130(tmp_path):
    (tmp_path / "cyclopts.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)")
    scripts = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["gradwire"].partition(":")
    script = f"import sys; from {module} import {function}; sys.exit({function}())"
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    for words in (["-m", "gradwire"], ["-c", script]):
        ended = subprocess.run(
            [sys.executable, *words, "methods"],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (cli.INTERRUPTED, "", "interrupted\n")


def _workers_in(folder):
    """Worker processes whose working directory is ``folder``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            if b"gradwire_bench.train_worker" in command and (process / "cwd").readlink() == folder:
                found.append(int(process.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_has_no_room_is_told() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run([*GRADWIRE, "methods"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == cli.USAGE_ERROR
    assert "No space left on device; make room" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_command_has_the_last_word() -> None:
    """What it loads, as torch's compiler, says nothing at the end, such as of objects that are left."""
    command = [*GRADWIRE, "simulate", "topk", "--shapes", "lstm", "--workers", "2", "--link", "1gbit"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
