"""The lab itself: workers, each with an address and a link of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType

from gradwire.errors import ConfigurationError, LabError
from gradwire.lab.launch import KeeperClient, LineCallback, Run, RunResult
from gradwire.lab.network import (
    MAX_WORKERS,
    InterfaceCounters,
    Sites,
    availability,
    build_network,
    parse_counters,
    site_interface,
    worker_address,
    worker_interface,
)
from gradwire.lab.rate import Shape, parse_rate
from gradwire.plain import plain


class Lab:
    """Worker processes on one machine, as if each were a machine on a switch.

    Every worker has a network namespace with one interface (`wireN`, 10.77.0.N+1), joined to the others' by a bridge
    in a namespace of its own. A token bucket holds each worker's upload to `rate`, another its download; `Shape` tells
    how closely. The namespaces are anonymous and belong to a process of the lab's, so several labs can be open at once,
    the machine's own network is untouched, and everything is gone when the lab is left or the process that opened it
    dies, even by SIGKILL.

    With `sites`, workers are at several places, as many at each and neighbours in rank. Within a place they are on one
    switch; what goes to other places shares the place's one link, `between` in each direction.

    A context manager: the network is built on entering, and kept, counters and all, from run to run.

    Args:
        workers: Number of worker processes, 1 to 250.
        rate: Rate of each worker's link in each direction, such as `"1gbit"` or `"100mbit"` (1mbit to 100gbit). None
            for plain loopback: processes with neither namespaces nor shaping, for which nobody needs to be root.
        sites: Number of places that workers are at, of which it must be a divisor.
        between: Rate of each place's link to the others, written as `rate`; None for one place.

    Attributes:
        workers: Number of worker processes.
        shape: The shape of every worker's link; None for plain loopback.
        sites: The places; None if there is one.

    Raises:
        ConfigurationError: An argument is not among what is allowed.
    """

    def __init__(self, workers: int, rate: str | None, *, sites: int = 1, between: str | None = None) -> None:
        workers, sites = plain((workers, sites))
        if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= MAX_WORKERS:
            raise ConfigurationError(f"workers is {workers!r}: give a whole number of workers from 1 to {MAX_WORKERS}")
        self.workers = workers
        self.shape = None if rate is None else Shape(parse_rate(rate))
        self.sites = _sites(sites, between, workers, rate)
        self._resources = ExitStack()
        self._keeper: KeeperClient | None = None
        self._running = False

    def __enter__(self) -> Lab:
        """Builds the network.

        Raises:
            LabError: This machine does not allow it; the message says why, and how to go on without.
        """
        if self._keeper is not None:
            raise LabError("this lab is open already: enter it once, or make another Lab")
        with ExitStack() as building:
            if self.shape is None:
                keeper = building.enter_context(KeeperClient())
            else:
                allowed = availability()
                if allowed.how is None:
                    raise LabError(allowed.reason)
                keeper = building.enter_context(KeeperClient())
                build_network(keeper, self.workers, self.shape, allowed.how, self.sites)
            self._resources = building.pop_all()
        self._keeper = keeper
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._keeper = None
        self._resources.close()

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        silence: float | None = None,
        on_line: LineCallback | None = None,
        on_error_line: LineCallback | None = None,
        cwd: str | os.PathLike[str] | None = None,
        grace: float = 3.0,
    ) -> RunResult:
        """Runs a command once a worker and waits for all of them.

        Each worker gets this process's environment and what `torch.distributed` needs of it: RANK, LOCAL_RANK,
        WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (worker 0's, a port that was free just now),
        GLOO_SOCKET_IFNAME. OMP_NUM_THREADS and MKL_NUM_THREADS are 1, as workers share the machine; PYTHONUNBUFFERED
        is 1. Standard input is empty. Whatever a worker started ends with it.

        Args:
            argv: The command and its arguments.
            env: More variables for every worker; they win over those above.
            timeout: Seconds that the workers have; None for as long as they need.
            silence: Seconds that may pass without a line of any worker; None for as long as they like.
            on_line: Called with the rank and the line, for each line of standard output as it comes, in the thread
                that called `run`. An exception in it ends the workers and propagates.
            on_error_line: The same for standard error.
            cwd: The workers' working directory; None for this process's.
            grace: Seconds between asking a worker to end (SIGTERM) and making it (SIGKILL).

        Returns:
            What the workers printed, by rank, and how long they took.

        Raises:
            LabError: A worker failed: the message names the first one's rank, its exit code or signal, and the end of
                its standard error. Or time ran out, or nobody said anything for too long, or a worker could not
                start, or the lab is not open.
            ConfigurationError: An argument is not among what is allowed.
        """
        keeper = self._opened("run")
        if isinstance(argv, str) or not argv or not all(isinstance(word, str) for word in argv):
            raise ConfigurationError(f'argv is {argv!r}: give a list of strings, such as [sys.executable, "worker.py"]')
        for name, limit in (("timeout", timeout), ("silence", silence)):
            if limit is not None and not limit > 0:
                raise ConfigurationError(f"{name} is {limit!r}: give seconds above 0, or None for no limit")
        if not grace >= 0:
            raise ConfigurationError(f"grace is {grace!r}: give seconds of 0 or more")
        if self._running:
            raise LabError("this lab is running a command already: wait for it, or open another lab")
        self._running = True
        try:
            directory = os.getcwd() if cwd is None else os.fspath(cwd)
            run = Run(
                keeper,
                argv,
                self._environments(keeper, env or {}),
                cwd=directory,
                grace=grace,
                on_line=on_line,
                on_error_line=on_error_line,
            )
            return run.finish(timeout, silence)
        finally:
            self._running = False

    def counters(self) -> list[InterfaceCounters]:
        """Reads the counters of each worker's interface, by rank: all since the lab was opened, over every run.

        May be called between runs, and during one from its `on_line`.

        Raises:
            LabError: The lab is not open, or has no rate and so no interfaces of its own to count on.
        """
        tables = self._tables("counters")
        return [parse_counters(tables[rank], worker_interface(rank)) for rank in range(self.workers)]

    def site_counters(self) -> list[InterfaceCounters]:
        """Reads the counters of each site's link to the others, by site, as :meth:`counters` does; none of one place.

        Raises:
            LabError: As `counters`.
        """
        table = self._tables("site_counters")[self.workers]
        return [parse_counters(table, site_interface(site)) for site in range(self.sites.count if self.sites else 0)]

    def _tables(self, action: str) -> list[str]:
        """The kernel's table of each namespace."""
        keeper = self._opened(action)
        if self.shape is None:
            raise LabError(
                "a lab with rate=None has no interfaces of its own, only the machine's loopback: "
                'open it with a rate, such as rate="100gbit", to count bytes'
            )
        tables: list[str] = keeper.request("counters")
        return tables

    def _opened(self, action: str) -> KeeperClient:
        if self._keeper is None:
            raise LabError(f"the lab is not open, so {action} cannot work: call it inside `with Lab(...) as lab:`")
        return self._keeper

    def _environments(self, keeper: KeeperClient, extra: Mapping[str, str]) -> list[dict[str, str]]:
        address = "127.0.0.1" if self.shape is None else worker_address(0)
        shared = {
            **os.environ,
            "WORLD_SIZE": str(self.workers),
            "LOCAL_WORLD_SIZE": str(self.workers),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(keeper.request("port", namespace=0, address=address)),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        return [
            {
                **shared,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "GLOO_SOCKET_IFNAME": "lo" if self.shape is None else worker_interface(rank),
                **extra,
            }
            for rank in range(self.workers)
        ]


def _sites(count: int, between: str | None, workers: int, rate: str | None) -> Sites | None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1 or workers % count:
        raise ConfigurationError(f"sites is {count!r}: give a divisor of the number of workers, {workers}")
    if (count > 1) != (between is not None) or (between is not None and rate is None):
        raise ConfigurationError(
            f"sites={count}, between={between!r} and a rate of {rate!r} for each worker do not go together: for "
            'several sites give the rate of the links between them, such as between="100mbit", and that of each '
            "worker's; for one, give no between"
        )
    return None if between is None else Sites(count, Shape(parse_rate(between, "between")))
