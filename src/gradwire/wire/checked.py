"""Payloads with checksums: what arrives is what was sent, or an error."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire import kernels
from gradwire.errors import PayloadError
from gradwire.randomness import MASK64, key_of
from gradwire.wire.meter import Meter
from gradwire.wire.transport import Line, Pending

CHECKSUM_BYTES = 8


def checksums(words: Tensor, count: int) -> Tensor:
    """64-bit checksums, ``int64[n]``, of the first ``count`` words of the rows of ``int64[n, m]``, contiguous.

    The sum of all 8-byte words, folded and times an odd number of their own, modulo ``2**64``. Folding,
    ``word ^ (word >> 32)``, gives high bits a say in low ones. Any change within one word is found; changes of several
    cancel by chance only. It is no protection against changes that somebody makes on purpose.
    """
    sums = torch.empty(len(words), dtype=torch.int64, device=words.device)
    kernels.for_device(words.device).checksums(words, count, sums)
    return sums


def checksum_of(tensor: Tensor) -> int:
    """The checksum of all bits of a tensor."""
    words = _words(tensor.contiguous().view(-1).view(torch.uint8).unsqueeze(0), 0)
    return int(checksums(words, words.shape[1]))


class CheckedTransport:
    """A transport whose all-gathers, all-to-alls, exchanges and broadcasts carry a checksum for each payload.

    An all-reduce cannot carry one, since what arrives is a sum that nobody has sent. A checksum covers the payload, its
    sender and the collective's number, so that a payload of another step does not pass either. Payloads are padded to
    a multiple of 8 bytes; padding and checksum are metered.

    Args:
        inner: What sends.
        meter: Told of the bytes that come on top.
    """

    def __init__(self, inner: Line, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter
        self._number = 0
        self.rank = inner.rank
        self.world_size = inner.world_size

    def all_reduce(self, buffer: Tensor, operation: dist.ReduceOp.RedOpType) -> Pending:
        """Passes ``buffer`` on, unchecked."""
        return self._inner.all_reduce(buffer, operation)

    def broadcast(self, buffer: Tensor, source: int) -> Pending:
        """Overwrites ``buffer`` with that of rank ``source``, and checks it."""
        number = self._next()
        data = buffer.view(-1).view(torch.uint8).unsqueeze(0)
        sealed = self._seal(data, number)
        extra = sealed.nbytes - data.nbytes
        self._meter.broadcast(extra, (self.rank - source) % self.world_size, self.world_size)
        pending = self._inner.broadcast(sealed[0], source)

        def wait() -> Tensor:
            data.copy_(self._open(pending().unsqueeze(0), data.shape[1], number, "broadcast", [source]))
            return buffer

        return wait

    def exchange(self, payload: Tensor, partner: int) -> Pending:
        """Swaps ``payload`` with rank ``partner``, and checks what came."""
        number = self._next()
        if partner == self.rank:
            return self._inner.exchange(payload, partner)
        sealed = self._seal(payload.unsqueeze(0), number)
        self._meter.exchange(sealed.nbytes - payload.nbytes)
        pending = self._inner.exchange(sealed[0], partner)
        return lambda: self._open(pending().unsqueeze(0), len(payload), number, "exchange", [partner])[0]

    def all_gather(self, payload: Tensor) -> Pending:
        """Collects ``uint8[b]`` from all workers as ``uint8[n, b]``, and checks each row."""
        number = self._next()
        sealed = self._seal(payload.unsqueeze(0), number)
        self._meter.all_gather(sealed.nbytes - payload.nbytes, self.world_size)
        pending = self._inner.all_gather(sealed[0])
        return lambda: self._open(pending(), len(payload), number, "all-gather", range(self.world_size))

    def all_to_all(self, payloads: Tensor) -> Pending:
        """Sends row ``r`` of ``uint8[n, b]`` to rank ``r``, and checks each row that comes."""
        number = self._next()
        sealed = self._seal(payloads, number)
        self._meter.all_to_all(sealed.nbytes - payloads.nbytes, self.world_size)
        pending = self._inner.all_to_all(sealed)
        return lambda: self._open(pending(), payloads.shape[1], number, "all-to-all", range(self.world_size))

    def abort(self) -> None:
        """Breaks off what is under way."""
        self._inner.abort()

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _seal(self, rows: Tensor, number: int) -> Tensor:
        """Rows ``uint8[n, b]``, each padded and followed by its checksum."""
        words = _words(rows, CHECKSUM_BYTES)
        words[:, -1] = checksums(words, words.shape[1] - 1) + _signed(key_of(number, self.rank))
        return words.view(torch.uint8)

    def _open(self, sealed: Tensor, width: int, number: int, operation: str, senders: Sequence[int]) -> Tensor:
        """The rows that were sealed; raises PayloadError if one was changed."""
        words = sealed.view(torch.int64)
        seals = torch.tensor([_signed(key_of(number, sender)) for sender in senders], device=sealed.device)
        wrong = (checksums(words, words.shape[1] - 1) + seals != words[:, -1]).nonzero().view(-1).tolist()
        if wrong:
            ranks = ", ".join(str(senders[row]) for row in wrong)
            raise PayloadError(
                f"the {operation} of {width} bytes from rank {ranks} to rank {self.rank} does not fit its checksum: "
                "the bytes were changed on their way, or the ranks are at different collectives; look at the network "
                "and memory of these machines, and start all workers again from the last checkpoint"
            )
        return sealed[:, :width]


def _words(rows: Tensor, room: int) -> Tensor:
    """A copy of ``uint8[n, b]`` as 8-byte words, with zeros behind and ``room`` more bytes."""
    count, width = rows.shape
    padded = torch.empty((count, -(-width // 8) * 8 + room), dtype=torch.uint8, device=rows.device)
    padded[:, :width] = rows
    padded[:, width:] = 0
    return padded.view(torch.int64)


def _signed(value: int) -> int:
    """A 64-bit number as torch writes it."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value
