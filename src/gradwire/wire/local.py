"""Several ranks in one process that take turns: collectives without a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.errors import ConfigurationError
from gradwire.wire.circles import Circles
from gradwire.wire.transport import Pending

Answers = Callable[[list[Tensor]], list[Tensor]]
"""What a collective gives each rank, from what all of them brought."""


@dataclass(eq=False)
class _Collective:
    """One collective, from its first rank's call to its last rank's answer.

    Attributes:
        operation: Its name, and what is brought.
        brought: What the ranks that have called it brought.
        partners: Whom each of them named, itself where it named nobody.
        answers: What each rank is still to have, once one has asked.
    """

    operation: str
    brought: dict[int, Tensor] = field(default_factory=dict)
    partners: dict[int, int] = field(default_factory=dict)
    answers: dict[int, Tensor] = field(default_factory=dict)


def local_transports(workers: int) -> tuple[LocalTransport, ...]:
    """A world of so many ranks: the transport of each."""
    collectives: dict[int, _Collective] = {}
    return tuple(LocalTransport(rank, workers, collectives) for rank in range(workers))


def local_circles(everybody: Sequence[LocalTransport], node_size: int) -> tuple[tuple[Circles, ...], LocalTransport]:
    """The circles of each rank of a world of nodes of ``node_size`` workers each, and rank 0's to its peers."""
    within = [local_transports(node_size) for _ in everybody[::node_size]]
    between = [local_transports(len(within)) for _ in range(node_size)]
    grid = [(each, *divmod(each.rank, node_size)) for each in everybody]
    circles = tuple(Circles(each, within[node][place], between[place][node]) for each, node, place in grid)
    return circles, between[0][0]


class LocalTransport:
    """One of several ranks that share a thread; made by :func:`local_transports`.

    A rank may wait for a collective once all ranks have issued it, so ranks are run in turns
    (:meth:`gradwire.wire.Scheduler.run`).

    Args:
        rank: This rank.
        world_size: Number of ranks.
        collectives: Those under way, by number, which all ranks share.

    Attributes:
        written_bytes: What this rank has brought, in bytes.
    """

    def __init__(self, rank: int, world_size: int, collectives: dict[int, _Collective]) -> None:
        self.rank = rank
        self.world_size = world_size
        self.written_bytes = 0
        self._collectives = collectives
        self._issued = 0

    def all_reduce(self, buffer: Tensor, operation: dist.ReduceOp.RedOpType) -> Pending:
        """Sums ``buffer`` over all ranks, in their order, or takes the largest values."""
        if operation == dist.ReduceOp.MAX:
            return self._join(
                "all-reduce of the largest", buffer, lambda ranks: _for_each(ranks, torch.stack(ranks).amax(0))
            )
        return self._join(
            "all-reduce", buffer, lambda ranks: _for_each(ranks, torch.stack(ranks).sum(0, dtype=buffer.dtype))
        )

    def broadcast(self, buffer: Tensor, source: int) -> Pending:
        """Gives what rank ``source`` has."""
        return self._join(
            f"broadcast from rank {source}", buffer, lambda ranks: _for_each(ranks, ranks[source].clone())
        )

    def exchange(self, payload: Tensor, partner: int) -> Pending:
        """Swaps ``payload`` with rank ``partner``; this rank itself is a partner, too."""
        return self._join("exchange", payload, lambda ranks: [each.clone() for each in ranks], partner)

    def all_gather(self, payload: Tensor, straight: bool = False) -> Pending:
        """Collects ``uint8[b]`` from all ranks as ``uint8[n, b]``."""
        return self._join("all-gather", payload, lambda ranks: _for_each(ranks, torch.stack(ranks)))

    def all_to_all(self, payloads: Tensor) -> Pending:
        """Sends row ``r`` of ``uint8[n, b]`` to rank ``r``; row ``r`` of the result came from there."""
        return self._join(
            "all-to-all",
            payloads,
            lambda ranks: [torch.stack([rows[rank] for rows in ranks]) for rank in range(len(ranks))],
        )

    def _join(self, operation: str, payload: Tensor, answers: Answers, partner: int | None = None) -> Pending:
        """Brings a payload to this rank's next collective.

        Args:
            operation: Its name, which all ranks must give.
            payload: What this rank brings.
            answers: What becomes of it.
            partner: The rank whose answer is this rank's; itself if None.
        """
        number = self._issued
        self._issued += 1
        self.written_bytes += payload.nbytes
        said = f"{operation} of {payload.dtype}, {tuple(payload.shape)}"
        collective = self._collectives.setdefault(number, _Collective(said))
        if collective.operation != said:
            raise self._failed(f"asks for {said} where rank {min(collective.brought)} asks for {collective.operation}")
        collective.brought[self.rank] = payload
        collective.partners[self.rank] = self.rank if partner is None else partner

        def wait() -> Tensor:
            if len(collective.brought) < self.world_size:
                raise self._failed(f"asks for {said} that only ranks {sorted(collective.brought)} ask for")
            if not collective.answers:  # all of them now: who has an answer may write to what it brought
                given = answers([collective.brought[rank] for rank in range(self.world_size)])
                collective.answers = {rank: given[partner] for rank, partner in collective.partners.items()}
            answer = collective.answers.pop(self.rank)
            if not collective.answers:
                del self._collectives[number]
            return answer

        return wait

    def _failed(self, said: str) -> ConfigurationError:
        return ConfigurationError(
            f"rank {self.rank} {said}; in every round ask for the same on all ranks: as many requests, in one order, "
            "of one kind, dtype and size"
        )


def _for_each(ranks: list[Tensor], answer: Tensor) -> list[Tensor]:
    """A copy for each rank, since a rank may write to its answer."""
    return [answer, *(answer.clone() for _ in ranks[1:])]
