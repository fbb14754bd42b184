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


def least_ratio(route: Route, workers: int, dense_bits: int = 32) -> float:
    """How many times smaller than float32 payloads must be, for a route to move fewer bytes than a dense average.

    Args:
        route: How payloads become an average.
        workers: n.
        dense_bits: Bits a value of the dense average.
    """
    return 32 / dense_bits * (workers / 2 if route == "gather" else 1.0)


def most_encoding(route: Route, ratio: float, workers: int, rate: float, dense_bits: int = 32) -> float:
    """Seconds a value that encoding and decoding may take where nothing is hidden, for compression to gain.

    Args:
        route: How payloads become an average.
        ratio: How many times smaller than float32 payloads are.
        workers: n.
        rate: Of a link, in bits a second.
        dense_bits: Bits a value of the dense average.
    """
    dense = link_bytes("allreduce", dense_bits / 8, workers)
    return 8 * (dense - link_bytes(route, 4 / ratio, workers)) / rate


def hiding_rate(nbytes: float, workers: int, backward_seconds: float) -> float:
    """The rate of links, in bits a second, above which an all-reduce of so many bytes hides behind backward."""
    return 8 * link_bytes("allreduce", nbytes, workers) / backward_seconds
