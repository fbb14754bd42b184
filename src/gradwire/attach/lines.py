"""What everything is sent on: lines to all workers and, where they are in nodes, to two circles of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from gradwire.engine.nodes import Nodes
from gradwire.wire import CheckedTransport, Line, Lines, Meter, transport_for
from gradwire.wire.sibling import sibling_of
from gradwire.wire.transport import timeout_of


@contextmanager
def left_if_refused(line: Line) -> Iterator[None]:
    """Leaves the other workers if what is done within raises, which it does on all of them."""
    try:
        yield
    except BaseException:
        line.close()
        raise


def line_to(
    group: dist.ProcessGroup,
    transport: Line,
    device: torch.device,
    nodes: Nodes | None,
    meter: Meter,
    checked: bool,
) -> Line:
    """The line to all workers of a group, and those to the same node and to the same place; made by all of them.

    Args:
        group: The workers.
        transport: Theirs.
        device: Where the gradients live.
        nodes: How they are in nodes, if they are.
        meter: Told of the bytes of checksums.
        checked: Whether every payload is to carry one.
    """
    everybody: Line = CheckedTransport(transport, meter) if checked else transport
    if nodes is None:
        return everybody
    ranks, made = dist.get_process_group_ranks(group), []
    for circle, tally in ((nodes.mates(transport.rank), meter.node), (nodes.peers(transport.rank), meter)):
        sibling = sibling_of(group, device, [ranks[each] for each in circle])
        line = transport_for(sibling, device, timeout_of(group))
        made.append(CheckedTransport(line, tally) if checked else line)
    return Lines(everybody, *made)
