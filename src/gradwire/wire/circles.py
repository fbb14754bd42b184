"""Workers in nodes: a transport to all of them, one within the node, and one to those who have the same place."""

from __future__ import annotations

from gradwire.errors import ConfigurationError
from gradwire.wire.requests import Circle
from gradwire.wire.transport import Line, Transport


class Circles:
    """The transport to all workers, and those to two circles of them; all are watched, broken off and left together.

    Args:
        everybody: All workers.
        node: The workers of this node, by their places.
        peers: The workers of this place, by their nodes.
    """

    def __init__(self, everybody: Transport, node: Transport, peers: Transport) -> None:
        self.circles: dict[Circle, Transport] = {"all": everybody, "node": node, "peers": peers}
        self.rank = everybody.rank
        self.world_size = everybody.world_size
        self.all_reduce = everybody.all_reduce
        self.broadcast = everybody.broadcast
        self.exchange = everybody.exchange
        self.all_gather = everybody.all_gather
        self.all_to_all = everybody.all_to_all


class Lines(Circles):
    """The same of lines.

    Args:
        everybody: All workers.
        node: The workers of this node, by their places.
        peers: The workers of this place, by their nodes.
    """

    def __init__(self, everybody: Line, node: Line, peers: Line) -> None:
        super().__init__(everybody, node, peers)
        self._lines = everybody, node, peers

    def look(self) -> None:
        """Looks after what is under way."""
        for line in self._lines:
            line.look()

    def abort(self) -> None:
        """Ends whatever is under way with an error."""
        for line in self._lines:
            line.abort()

    def close(self) -> None:
        """Leaves the other workers."""
        for line in self._lines:
            line.close()


def circle_of(transport: Transport, circle: Circle) -> Transport:
    """The transport to a circle of workers.

    Raises:
        ConfigurationError: If the workers are in no nodes.
    """
    if circle == "all":
        return transport
    if isinstance(transport, Circles):
        return transport.circles[circle]
    raise ConfigurationError(f"a method asks for a collective among {circle!r}, but the workers are in no nodes")
