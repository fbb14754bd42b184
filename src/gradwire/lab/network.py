"""The topology of a lab, whether this machine can have one, and what its interfaces count."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gradwire.errors import LabError
from gradwire.lab.launch import KeeperClient, elsewhere
from gradwire.lab.rate import Shape

MAX_WORKERS = 250
"""Most workers that a lab's addresses are enough for."""

_ON_WITHOUT = "use rate=None for workers over plain loopback, unshaped"


@dataclass(frozen=True)
class InterfaceCounters:
    """What an interface has sent and received since it came up, as the kernel counts it.

    Bytes include headers. TCP hands the kernel segments of up to 64 KiB, and a segment counts as one packet with one
    header, so the bytes of a long transfer are close to its payload (within about 1.5 %), and its packets are segments
    rather than 1500-byte frames. Acknowledgements and address resolution count too.

    Attributes:
        tx_bytes: Bytes sent.
        rx_bytes: Bytes received.
        tx_packets: Packets sent.
        rx_packets: Packets received.
    """

    tx_bytes: int
    rx_bytes: int
    tx_packets: int
    rx_packets: int

    def __sub__(self, earlier: InterfaceCounters) -> InterfaceCounters:
        """Returns what was counted between `earlier` and this reading of the same interface."""
        return InterfaceCounters(
            tx_bytes=self.tx_bytes - earlier.tx_bytes,
            rx_bytes=self.rx_bytes - earlier.rx_bytes,
            tx_packets=self.tx_packets - earlier.tx_packets,
            rx_packets=self.rx_packets - earlier.rx_packets,
        )


@dataclass(frozen=True)
class Availability:
    """Whether this machine can shape a network for a lab.

    Attributes:
        possible: True if a lab with a rate can be opened.
        how: What allows it, `"root"` or `"user namespace"`; None if nothing does.
        reason: A sentence: what allows it, or why not and how to go on without.
    """

    possible: bool
    how: str | None
    reason: str


@dataclass(frozen=True)
class Sites:
    """Places that workers are at, as many at each and neighbours in rank, every place with one link to all others.

    Attributes:
        count: Number of places, at least 2.
        link: The shape of each one's link to the others, in each direction.
    """

    count: int
    link: Shape


def site_interface(site: int) -> str:
    """Returns the name of a site's interface to the others, on the side of its workers."""
    return f"uplink{site}"


def worker_interface(rank: int) -> str:
    """Returns the name of a worker's interface, inside the worker's own namespace."""
    return f"wire{rank}"


def worker_address(rank: int) -> str:
    """Returns a worker's IPv4 address; labs do not see each other, so every lab has the same."""
    return f"10.77.0.{rank + 1}"


def interface_counters() -> InterfaceCounters:
    """Reads the counters of the calling worker's own interface, the one that `GLOO_SOCKET_IFNAME` names.

    Called inside a worker, before and after a step, the difference is what the step put on the wire. In a lab without a
    rate the interface is `lo`, which everything on the machine shares and on which whatever is sent is also received.

    Returns:
        Bytes and packets since the interface came up.

    Raises:
        LabError: `GLOO_SOCKET_IFNAME` is not set, or names no interface of this process's network.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if not name:
        raise LabError(
            "GLOO_SOCKET_IFNAME is not set, so this process is no worker of a lab: start it by Lab.run, "
            "or set GLOO_SOCKET_IFNAME to the interface to count"
        )
    return parse_counters(Path("/proc/self/net/dev").read_text(), name)


def parse_counters(table: str, name: str) -> InterfaceCounters:
    """Finds an interface in the text of `/proc/net/dev`.

    Args:
        table: The whole text.
        name: The interface's name.

    Returns:
        The interface's counters.

    Raises:
        LabError: The table has no such interface.
    """
    rows = {
        key.strip(): row.split() for key, colon, row in (line.partition(":") for line in table.splitlines()) if colon
    }
    if name not in rows:
        raise LabError(f"there is no interface {name!r} here: this network has {', '.join(sorted(rows)) or 'none'}")
    row = rows[name]
    return InterfaceCounters(tx_bytes=int(row[8]), rx_bytes=int(row[0]), tx_packets=int(row[9]), rx_packets=int(row[1]))


def build_network(keeper: KeeperClient, workers: int, shape: Shape, how: str, sites: Sites | None = None) -> None:
    """Has a keeper build a lab's network: namespace `rank` for each worker, and the switches' after them.

    The workers of a site are on a switch of their own, and its link leads to one in the middle.

    Args:
        keeper: The keeper, new.
        workers: Number of workers.
        shape: The shape of each worker's upload and of its download.
        how: `"root"` or `"user namespace"`.
        sites: Where workers are; None for all in one place.

    Raises:
        LabError: The machine does not allow it, or lacks `ip` and `tc`.
    """
    ip, tc = _command("ip"), _command("tc")
    switches = workers  # the namespace
    # Without this, interfaces give themselves IPv6 addresses and chatter about them.
    quiet = "addrgenmode none" if Path("/proc/sys/net/ipv6").exists() else ""
    largest = f"gso_max_size {min(each.segment_bytes for each in (shape, *([sites.link] if sites else [])))}"

    def switch(name: str) -> list[str]:
        return [
            f"link add {name} type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
            f"link set {name} {quiet} {largest}",
            f"link set {name} up",
        ]

    def plugged(interface: str, name: str) -> list[str]:
        return [f"link set {interface} master {name} {quiet} {largest}", f"link set {interface} up"]

    def shaped(interface: str, to: Shape) -> str:
        return f"qdisc add dev {interface} root {to.tc_arguments()}"

    names = [f"switch{site}" for site in range(1 if sites is None else sites.count)]
    links = [line for name in names for line in switch(name)]
    queues: list[str] = []
    steps: list[tuple[int, list[str], list[str]]] = []
    if sites is not None:
        links += switch("middle")
        for site, name in enumerate(names):
            here, there = site_interface(site), f"downlink{site}"
            links += [f"link add {here} type veth peer name {there}", *plugged(here, name), *plugged(there, "middle")]
            queues += [shaped(here, sites.link), shaped(there, sites.link)]
    for rank in range(workers):
        interface, port = worker_interface(rank), f"port{rank}"
        links += [f"link add {port} type veth peer name {interface} netns {{{rank}}}"]
        links += plugged(port, names[rank * len(names) // workers])
        queues += [shaped(port, shape)]
        worker_links = [
            "link set lo up",
            f"addr add {worker_address(rank)}/24 dev {interface}",
            f"link set {interface} {quiet} {largest}",
            f"link set {interface} up",
        ]
        steps += [(rank, [ip, "-batch", "-"], worker_links), (rank, [tc, "-batch", "-"], [shaped(interface, shape)])]
    steps = [(switches, [ip, "-batch", "-"], links), (switches, [tc, "-batch", "-"], queues), *steps]
    keeper.request(
        "build",
        user_namespace=how == "user namespace",
        namespaces=workers + 1,
        steps=[(namespace, argv, "\n".join(lines) + "\n") for namespace, argv, lines in steps],
    )


@cache
def availability() -> Availability:
    """Tells whether this machine can shape a network, by building the smallest one and taking it down.

    It needs Linux, the `ip` and `tc` commands of iproute2, the bridge, veth and tbf of the kernel, and either root (to
    be exact, CAP_SYS_ADMIN and CAP_NET_ADMIN) or user namespaces that anyone may create. In a user namespace the
    workers take themselves for root, and what they write belongs to the user who opened the lab. The answer takes
    about a tenth of a second, and is kept for the life of the process.

    Returns:
        What is possible, how, and why not.
    """
    if why := elsewhere():
        return Availability(False, None, why)
    refusals = []
    for how in ("root", "user namespace"):
        try:
            with KeeperClient() as keeper:
                build_network(keeper, workers=1, shape=Shape(1_000_000_000), how=how)
        except LabError as error:
            refusals.append(f"as {how}: {error}")
        else:
            return Availability(True, how, f"a shaped network can be built here as {how}")
    return Availability(
        False, None, f"no shaped network can be built on this machine ({'; '.join(refusals)}): {_ON_WITHOUT}"
    )


def _command(name: str) -> str:
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if path is None:
        raise LabError(f"the command {name!r} is missing (install iproute2)")
    return path
