"""The process that owns everything a lab has: its network namespaces and its workers.

Run as a script, in an interpreter that imports the standard library alone. It obeys requests that arrive on a socket
from the process that opened the lab (see `gradwire.lab.launch.KeeperClient`) and cleans up when that process ends the
conversation or dies, by whatever signal. The namespaces have no names: only this process's descriptors hold them, so
the kernel takes them down, with every interface in them, when this process and the workers are gone.

A message is four bytes of length, then JSON; descriptors travel with the length.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_WAIT = 3600.0  # seconds; what can be asked of the kernel at once is limited


def send_message(connection: socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    """Sends one message, with open file descriptors if there are any."""
    body = json.dumps(message).encode()
    socket.send_fds(connection, [len(body).to_bytes(4, "big")], descriptors)
    connection.sendall(body)


def receive_message(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receives one message and the descriptors that came with it; None when the other side has gone."""
    try:
        header, descriptors, _, _ = socket.recv_fds(connection, 4, 2)
        if len(header) < 4:
            return None
        left = int.from_bytes(header, "big")
        body = bytearray()
        while len(body) < left:
            piece = connection.recv(left - len(body))
            if not piece:
                return None
            body += piece
    except ConnectionResetError:  # it has gone, and had not read all that was said
        return None
    return json.loads(body), descriptors


def _system_call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _enter_user_namespace() -> None:
    user, group = os.geteuid(), os.getegid()
    _system_call("unshare", _CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _children() -> list[int]:
    """Returns the processes whose parent is this one, by adoption too."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            state_and_parent = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(state_and_parent[1]) == os.getpid():
                found.append(int(entry.name))
    return found


class Keeper:
    """Serves one lab until the process that opened it hangs up or dies.

    Args:
        control: The socket that requests come from and replies go to.
        parent: Process id of the one that opened the lab.
    """

    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control = control
        self._parent = parent
        self._namespaces: list[int] = []
        self._workers: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
        self._kill_at: float | None = None
        self._asked_to_stop = False
        self._wake, wake_write = socket.socketpair()
        self._wake.setblocking(False)
        wake_write.setblocking(False)
        self._wake_write = wake_write
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGUSR1, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        _system_call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._watch_parent()

    def serve(self) -> None:
        """Obeys requests; returns with every worker and descendant of a worker dead."""
        try:
            while not self._asked_to_stop and os.getppid() == self._parent:
                left = _LONGEST_WAIT if self._kill_at is None else self._kill_at - time.monotonic()
                wait = min(max(left, 0.0), _LONGEST_WAIT)
                ready, _, _ = select.select([self._control, self._wake], [], [], wait)
                if self._wake in ready:
                    self._wake.recv(4096)
                self._reap()
                if self._kill_at is not None and time.monotonic() >= self._kill_at:
                    self._kill_at = None
                    self._signal_workers(signal.SIGKILL)
                if self._control in ready and not self._obey():
                    break
        finally:
            self._workers.clear()
            self._kill_children()

    def _on_sigterm(self, *_: object) -> None:
        self._asked_to_stop = True

    def _watch_parent(self) -> None:
        """Has the kernel wake this process when its parent dies; a parent's fork may keep the socket open."""
        _system_call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGUSR1), 0, 0, 0)

    def _obey(self) -> bool:
        received = receive_message(self._control)
        if received is None:
            return False
        request, descriptors = received
        requests: dict[str, Callable[..., Any]] = {
            "build": self._build,
            "port": self._free_port,
            "spawn": self._spawn,
            "counters": self._counters,
            "end": self._end,
        }
        operation = requests[request.pop("op")]
        try:
            answer = {"reply": operation(*descriptors, **request)}
        except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
            answer = {"error": str(error)}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        try:
            send_message(self._control, answer)
        except OSError:
            return False
        return True

    def _build(self, user_namespace: bool, namespaces: int, steps: list[tuple[int, list[str], str]]) -> None:
        """Opens namespaces and runs each step: a namespace, a command, and its input, where {i} is namespace i."""
        if user_namespace:
            _enter_user_namespace()
            self._watch_parent()  # a change of credentials has cleared it
        for _ in range(namespaces):
            _system_call("unshare", _CLONE_NEWNET)
            self._namespaces.append(os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        paths = [f"/proc/self/fd/{descriptor}" for descriptor in self._namespaces]
        for namespace, argv, text in steps:
            self._enter(namespace)
            done = subprocess.run(
                argv,
                input=text.format(*paths),
                text=True,
                capture_output=True,
                pass_fds=self._namespaces,
            )
            if done.returncode != 0:
                raise RuntimeError(f"{os.path.basename(argv[0])}: {' '.join(done.stderr.split())}")

    def _enter(self, namespace: int) -> None:
        if self._namespaces:
            _system_call("setns", self._namespaces[namespace], _CLONE_NEWNET)

    def _free_port(self, namespace: int, address: str) -> int:
        self._enter(namespace)
        with socket.socket() as probe:
            probe.bind((address, 0))
            return int(probe.getsockname()[1])

    def _counters(self) -> list[str]:
        tables = []
        for namespace in range(len(self._namespaces)):
            self._enter(namespace)
            tables.append(Path("/proc/self/net/dev").read_text())
        return tables

    def _spawn(
        self, stdout: int, stderr: int, rank: int, namespace: int, argv: list[str], env: dict[str, str], cwd: str
    ) -> int:
        keeper = os.getpid()
        self._enter(namespace)

        def die_with_keeper() -> None:
            _system_call("prctl", _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != keeper:
                os._exit(1)

        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=env,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=die_with_keeper,  # safe: this process has one thread
        )
        self._workers[process.pid] = (rank, process)
        return process.pid

    def _end(self, grace: float) -> None:
        self._signal_workers(signal.SIGTERM)
        self._kill_at = time.monotonic() + grace

    def _signal_workers(self, number: signal.Signals) -> None:
        for pid in self._workers:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)

    def _reap(self) -> None:
        """Buries the dead: a worker takes its process group with it, the last one whatever is left of any."""
        while self._workers:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if dead is None:
                return
            if dead.si_pid in self._workers:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(dead.si_pid, signal.SIGKILL)  # before the wait, which frees the number
            _, status = os.waitpid(dead.si_pid, 0)
            if dead.si_pid not in self._workers:
                continue
            rank, process = self._workers.pop(dead.si_pid)
            process.returncode = os.waitstatus_to_exitcode(status)
            if not self._workers:
                self._kill_at = None
                self._kill_children()
            with suppress(OSError):
                send_message(self._control, {"exited": rank, "code": process.returncode})

    def _kill_children(self) -> None:
        """Kills every child; theirs become this process's children and follow."""
        while children := _children():
            for pid in children:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)


def main(descriptor: int, parent: int) -> NoReturn:
    """Serves the lab at the other end of a socket, then exits.

    Args:
        descriptor: File descriptor of the socket.
        parent: Process id of the one that opened the lab.
    """
    with socket.socket(fileno=descriptor) as control:
        Keeper(control, parent).serve()
    sys.exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
