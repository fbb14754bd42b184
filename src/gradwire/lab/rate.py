"""Rates as written ("1gbit") and the token bucket that holds a link to one."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire import units

MIN_RATE = 1_000_000
"""Slowest link a lab offers, in bits per second."""

MAX_RATE = 100_000_000_000
"""Fastest link a lab offers, in bits per second."""

_BURST_SECONDS = 1e-3
_MIN_BURST_BYTES = 8192
_MAX_SEGMENT_BYTES = 65536
_QUEUE_SECONDS = 50e-3


def parse_rate(text: str, name: str = "rate") -> int:
    """Reads a link rate.

    Args:
        text: A number and a unit, such as `"100mbit"`, `"2.5gbit"` or `"1 Gbit"`, as :func:`gradwire.units.rate` has
            them.
        name: What it is called, for the error.

    Returns:
        The rate in bits per second.

    Raises:
        ConfigurationError: The text is not a rate, or is outside 1mbit to 100gbit.
    """
    return round(units.rate(text, name, MIN_RATE, MAX_RATE))


@dataclass(frozen=True)
class Shape:
    """How one direction of a link is shaped: a token bucket (`tbf`) at the link's rate.

    The bucket holds one millisecond of the rate, and at least 8 KiB. A bucket starts full and refills when the link is
    idle, so the first millisecond's worth of a transfer passes at once: a transfer of 20 ms looks 5 % shorter than on a
    real link, one of 1 ms costs next to nothing. A smaller bucket would be emptied by the kernel's timers instead and
    fall short of the rate.

    TCP hands the network segments of up to 64 KiB, to be cut to frames by hardware that a virtual link lacks. A
    segment must fit the bucket, so slower links get smaller segments: at most 15/16 of the bucket, which leaves room
    for the headers of its frames, that the bucket charges for. What reaches the rate is thus the frames on the wire:
    with 1500-byte frames TCP carries 95.6 % of it as payload (1448 of 1514 bytes), as on Ethernet.

    Packets wait in a queue of 50 ms, deep enough that workers sending to one at the same time wait for each other and
    lose nothing.

    Attributes:
        rate: Bits per second, of whole Ethernet frames.
    """

    rate: int

    @property
    def burst_bytes(self) -> int:
        """Size of the token bucket, in bytes."""
        return max(int(self.rate / 8 * _BURST_SECONDS), _MIN_BURST_BYTES)

    @property
    def segment_bytes(self) -> int:
        """Largest segment that the network is handed, in bytes."""
        return min(self.burst_bytes * 15 // 16, _MAX_SEGMENT_BYTES)

    def tc_arguments(self) -> str:
        """Returns the queueing discipline in the words of `tc qdisc add dev DEVICE root`."""
        return f"tbf rate {self.rate}bit burst {self.burst_bytes} latency {_QUEUE_SECONDS * 1e3:.0f}ms"
