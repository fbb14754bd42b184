"""The wire: what methods ask for, fused, ordered, issued and metered."""

from gradwire.wire.checked import CheckedTransport
from gradwire.wire.circles import Circles, Lines
from gradwire.wire.local import LocalTransport, local_circles, local_transports
from gradwire.wire.meter import Meter
from gradwire.wire.requests import (
    AllGather,
    AllReduceMax,
    AllReduceMean,
    AllReduceSum,
    AllToAll,
    Broadcast,
    Exchange,
    Request,
    Synchronization,
    among,
    late,
    lockstep,
)
from gradwire.wire.scheduler import Scheduler
from gradwire.wire.staged import StagedTransport, transport_for
from gradwire.wire.transport import Line, Pending, ProcessGroupTransport, Transport
from gradwire.wire.wire import Wire

__all__ = [
    "AllGather",
    "AllReduceMax",
    "AllReduceMean",
    "AllReduceSum",
    "AllToAll",
    "Broadcast",
    "CheckedTransport",
    "Circles",
    "Exchange",
    "Line",
    "Lines",
    "LocalTransport",
    "Meter",
    "Pending",
    "ProcessGroupTransport",
    "Request",
    "Scheduler",
    "StagedTransport",
    "Synchronization",
    "Transport",
    "Wire",
    "among",
    "late",
    "local_circles",
    "local_transports",
    "lockstep",
    "transport_for",
]
