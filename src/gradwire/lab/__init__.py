"""A shaped network of worker processes on one machine.

`Lab` gives every worker a network namespace and an interface of its own, joins them by a bridge, and holds each
worker's upload and download to a rate. Inside, `torch.distributed` with gloo and `env://` works as it does on as many
machines; bytes on the wire are counted by the kernel. Nothing is ever visible in, or taken from, the machine's own
network, and nothing outlives the process that opened the lab. Linux only.
"""

from __future__ import annotations

from gradwire.lab.laboratory import Lab
from gradwire.lab.launch import RunResult
from gradwire.lab.network import Availability, InterfaceCounters, availability, interface_counters
from gradwire.lab.rate import Shape, parse_rate

__all__ = [
    "Availability",
    "InterfaceCounters",
    "Lab",
    "RunResult",
    "Shape",
    "availability",
    "interface_counters",
    "parse_rate",
]
