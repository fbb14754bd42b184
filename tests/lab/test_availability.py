"""Where a lab is possible, and what is said where it is not."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import textwrap

import pytest

from gradwire import lab
from gradwire.errors import LabError
from gradwire.lab.launch import elsewhere


def without_privileges(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(program)]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("setpriv, which gives up root's privileges, is not installed")
        command = ["setpriv", "--bounding-set=-all,+setfcap", "--inh-caps=-all", *command]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_user_namespace_does_without_root() -> None:
    program = """
        from gradwire import lab
        found = lab.availability()
        print(found.how or found.reason)
        if found.possible:
            with lab.Lab(workers=2, rate="1gbit") as opened:
                print(opened.run(["sh", "-c", "cat /proc/net/dev | grep -c wire$RANK"]).outputs)
    """
    done = without_privileges(program)
    assert done.returncode == 0, done.stderr
    if not done.stdout.startswith("user namespace"):
        pytest.skip(done.stdout.strip())
    assert done.stdout == "user namespace\n['1\\n', '1\\n']\n"


def test_where_nothing_allows_it_the_way_on_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    lab.availability.cache_clear()
    try:
        found = lab.availability()
        assert (found.possible, found.how) == (False, None)
        with (
            pytest.raises(LabError, match=r"'ip' is missing \(install iproute2\).*rate=None"),
            lab.Lab(workers=2, rate="1gbit"),
        ):
            pass
    finally:
        lab.availability.cache_clear()


@pytest.mark.parametrize("system", ["Windows", "Darwin"])
def test_elsewhere_than_on_linux_no_lab_is_tried(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.availability.cache_clear()
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("began a process"))
    try:
        assert lab.availability() == lab.Availability(False, None, elsewhere())
        for rate in (None, "1gbit"):
            with pytest.raises(LabError, match=f"needs Linux, and this is {system}"), lab.Lab(workers=2, rate=rate):
                pass
    finally:
        lab.availability.cache_clear()
