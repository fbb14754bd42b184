"""Programs that begin as copies of a process which has imported what takes seconds: torch, Numba, scikit-learn.

:func:`python` gives an executable that takes ``-c``, ``-m`` or a file, as Python does. It asks a template, one process
for all that run tests, for a copy, which has its open files, namespaces, environment and folder; it passes signals on,
and ends as the copy does. What a test is to show of a start itself needs a Python of its own.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

USUAL = (
    "gradwire.kernels.cpu",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "sklearn.datasets",
    "gradwire_bench.train_worker",
    "gradwire_bench.periodic_worker",
    "gradwire_bench.sync_worker",
)

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")

SPACES = {"user": 0x10000000, "net": 0x40000000}
"""Namespaces that a copy enters, and what the kernel calls them."""

BY_ITSELF = "RANK_THAT_BEGINS_BY_ITSELF"
"""Environment variable: the rank, if any, whose program is to show that it imports what it needs."""

MOST_BYTES, MOST_FILES = 1 << 17, 250


def python(folder: Path, *imported: str, **environment: str) -> str:
    """The executable, in a folder that all test processes of a run have in common.

    Args:
        folder: Where it goes.
        imported: Modules that the template imports; what most benchmarks need if none are given.
        environment: Variables that it has when it does.
    """
    own = folder / format(zlib.crc32(repr((imported, environment)).encode()), "x")
    path, address = own / "python", str(own / "socket")
    with (folder / "copies.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            own.mkdir()
            _start(address, imported or USUAL, environment)
            path.write_text(
                f"#!{sys.executable} -IS\nimport sys\nsys.path.append({str(Path(__file__).parent)!r})\n"
                f"import copies\ncopies.ask({sys.executable!r}, {address!r}, sys.argv[1:])\n"
            )
            path.chmod(0o755)
    return str(path)


def _start(address: str, imported: Sequence[str], environment: dict[str, str]) -> None:
    """Begins the template, which ends with what runs the tests."""
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(100)
        subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno()), str(owner), *imported],
            env={**os.environ, **dict.fromkeys(THREADS, "1"), "PYTHONUNBUFFERED": "1", **environment},
            pass_fds=[listener.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )


def ask(itself: str, address: str, arguments: list[str]) -> None:
    """What the executable does; the lab's keeper, which wants no packages, is a Python of its own."""
    if arguments[:1] == ["-I"] or os.environ.get("RANK", "") == os.environ.get(BY_ITSELF):
        os.execv(itself, [itself, *arguments])
    files = [file for file in map(int, os.listdir("/proc/self/fd")) if file > 2 and _inherited(file)]
    spaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in SPACES]
    told = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "files": [0, 1, 2, *files]}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as template:
        template.connect(address)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: template.send(bytes([number])))
        socket.send_fds(template, [json.dumps(told).encode()], [*spaces, 0, 1, 2, *files])
        for file in (0, 1, 2, *files):
            os.close(file)  # who waits for their end waits for the copy alone
        code = int(template.recv(16) or -signal.SIGKILL)
    if code < 0:
        with suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _inherited(file: int) -> bool:
    with suppress(OSError):
        return os.get_inheritable(file)
    return False


def _serve(listener: socket.socket, owner: int) -> list[str]:
    """The template; returns in each copy, with its arguments."""
    while owner not in (select.select([listener, owner], [], [])[0]):
        client = listener.accept()[0]
        if not os.fork():
            listener.close()
            os.close(owner)
            told, files, *_ = socket.recv_fds(client, MOST_BYTES, MOST_FILES)
            if copy := os.fork():
                _attend(client, copy, files)
            client.close()
            return _become(json.loads(told), files)
        client.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    os._exit(0)


def _attend(client: socket.socket, copy: int, files: list[int]) -> None:
    """Passes on what the client is sent, and how the copy ends; which ends with the client."""
    for file in (0, 1, 2, *files):
        os.close(file)
    running = os.pidfd_open(copy)
    while client in (ready := select.select([client, running], [], [])[0]) and running not in ready:
        number = client.recv(1)
        os.kill(copy, number[0] if number else signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
    with suppress(OSError):
        client.send(str(code).encode())
    os._exit(0)


def _become(told: dict[str, Any], files: list[int]) -> list[str]:
    """Gives a copy what its client has."""
    own, files = files[: len(SPACES)], files[len(SPACES) :]
    for space, (name, kind) in zip(own, SPACES.items(), strict=True):
        if os.fstat(space).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino:
            _set_namespace(space, kind)
        os.close(space)
    above = max(told["files"]) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in files]
    os.closerange(3, above)
    for file, number in zip(moved, told["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    os.setsid()
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environment"])
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    return list(told["arguments"])


def _set_namespace(space: int, kind: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).setns(space, kind):
        raise OSError(ctypes.get_errno(), "setns")


def _run(arguments: list[str]) -> None:
    """What Python does with its arguments, in a new ``__main__``."""
    while arguments[0] in ("-B", "-u"):
        arguments.pop(0)
    itself = sys.modules["__main__"] = types.ModuleType("__main__")
    what, *rest = arguments
    own = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    sys.path[:0] = [os.getcwd() if what in ("-c", "-m") else os.path.dirname(os.path.abspath(what)), *own]
    if what == "-m":
        sys.argv = rest
        sys.modules.pop(rest[0], None)
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif what == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), vars(itself))
    else:
        sys.argv = arguments
        itself.__file__ = what
        exec(compile(Path(what).read_text(), what, "exec"), vars(itself))


def _copy(arguments: list[str]) -> NoReturn:
    """Ends without taking down what the template has set up, which takes as long as setting it up."""
    code = 0
    try:
        _run(arguments)
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        if code and not isinstance(exit.code, int):
            print(exit.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for each in (sys.stdout, sys.stderr):
        each.flush()
    os._exit(code)


def main() -> NoReturn:
    """The template, and every copy of it."""
    listener, owner = socket.socket(fileno=int(sys.argv[1])), os.pidfd_open(int(sys.argv[2]))
    del sys.path[0]
    for name in sys.argv[3:]:
        importlib.import_module(name)
    if "gradwire.kernels.cpu" in sys.modules:
        runpy.run_path(str(Path(__file__).with_name("numba_ready.py")))
    gc.freeze()
    _copy(_serve(listener, owner))


if __name__ == "__main__":
    main()
