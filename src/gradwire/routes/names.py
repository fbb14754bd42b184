"""Routes that a codec's payloads take to all workers, by name.

A route of one's own has the arguments of :func:`gather`, leaves the same average on every rank, and is for every
method that can be gathered. ``"sharded"`` is none of these: its owners have memories of their own, which are kept,
saved and redistributed by shard. Nor are those that a few methods take by themselves, whose names are spoken for, too.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gradwire.layout import Block
from gradwire.registry import Registry
from gradwire.routes.gather import gather
from gradwire.routes.operator import Operator
from gradwire.wire.requests import Synchronization

Route = Callable[[Operator, Operator | None, Block, Tensor, int], Synchronization]

routes: Registry[Route] = Registry("route", spoken_for=("sharded", "allreduce", "integer", "merge", "regions"))

register, names, get = routes.register, routes.names, routes.get

register("gather")(gather)
