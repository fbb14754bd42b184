"""Averages alone, in closed form: bytes of n workers over links of one rate, latency and encoding left out.

A gradient takes b bytes in float32, b / c compressed. All-reduce moves ``2 (n - 1) / n b``, gather ``(n - 1) b / c``,
sharded ``2 (n - 1) / n b / c`` through each link. So gather gains over a dense average if ``c > n / 2`` (Tsuzuku et al.
2018, arXiv:1802.06058), sharded if ``c > 1`` at any n.
"""

from __future__ import annotations

from typing import Literal

Route = Literal["allreduce", "gather", "sharded"]


def link_bytes(route: Route, nbytes: float, workers: int) -> float:
    """What goes through each worker's link, in each direction.

    Args:
        route: How payloads become an average.
        nbytes: Of a payload of the whole gradient.
        workers: n.
    """
    return nbytes * (workers - 1) * (1.0 if route == "gather" else 2 / workers)


def hiding_rate(nbytes: float, workers: int, backward_seconds: float) -> float:
    """The rate of links, in bits a second, above which an all-reduce of so many bytes hides behind backward."""
    return 8 * link_bytes("allreduce", nbytes, workers) / backward_seconds
