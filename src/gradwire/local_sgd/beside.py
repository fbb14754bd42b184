"""What goes along with parameters: the optimizer's moments, and buffers such as batch norm's statistics."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.attach.shards import local
from gradwire.errors import ConfigurationError, GradwireError
from gradwire.local_sgd.finite import finite
from gradwire.local_sgd.fragments import Fragment, Piece
from gradwire.wire import AllGather, AllReduceMean, Synchronization

Values = dict[str, Tensor]
"""Tensors by name, float32 or float64, that are averaged densely beside a fragment."""


class Beside:
    """Goes along with the averages of fragments, on the thread that trains. This one does nothing."""

    def averages(self, fragment: Fragment) -> bool:
        """Whether it averages anything beside a fragment: the same on all ranks, whatever they have to average."""
        return False

    def collect(self, fragment: Fragment) -> Values:
        """What to average beside a fragment; fresh tensors."""
        return {}

    def shared(self, fragment: Fragment) -> Values:
        """What a fragment's last average left beside it: the same bits on all ranks, until its next one is taken."""
        return {}

    def take(self, fragment: Fragment, averages: Mapping[str, Tensor]) -> None:
        """Called when a fragment's average is taken, with the averages of what everything beside it collected."""

    def drop(self, fragment: Fragment, alone: bool) -> None:
        """Called instead when the average is not taken, because some of it is not finite.

        Args:
            fragment: Of what.
            alone: Whether it was averaged alone, as eager updates are, so that what is beside it has no new average.
        """


class KeptMoments(Beside):
    """Leaves the optimizer's moments alone, unless some are not finite where an average is dropped.

    Then all moments of such a coordinate are zeroed: a momentum of what was far too large, beside a variance of zero,
    would be a step as large. So is what else the optimizer keeps of these parameters, such as Adafactor's variances of
    rows, where it is not finite: it would be so for good.

    Args:
        optimizer: Whose moments.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def moments(self, fragment: Fragment) -> Iterator[tuple[str, Piece, Tensor]]:
        """Floating-point state of the parameters' shape, each with its key and piece; a count of steps is no moment."""
        for piece in fragment.pieces:
            for key, value in self._of(piece.parameter):
                yield key, piece, value

    def _of(self, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        for key, value in sorted(self._optimizer.state.get(parameter, {}).items()):
            moment = isinstance(value, Tensor) and value.shape == parameter.shape and key != "step"
            if moment and value.is_floating_point():
                yield key, value

    def drop(self, fragment: Fragment, alone: bool) -> None:
        """Zeroes what is not finite, and what else belongs to its coordinates."""
        for piece in fragment.pieces:
            moments = dict(self._of(piece.parameter))
            values = [piece.read(moment) for moment in moments.values()]
            if not all(map(finite, values)):
                sound = torch.stack([each.isfinite() for each in values]).all(0)
                for moment, each in zip(moments.values(), values, strict=True):
                    piece.write(moment, torch.where(sound, each, 0))
            for key, value in self._optimizer.state.get(piece.parameter, {}).items():
                if key not in moments and isinstance(value, Tensor) and value.is_floating_point():
                    part = local(value)
                    if not finite(part):
                        part.copy_(torch.where(part.isfinite(), part, 0))


class ResetMoments(KeptMoments):
    """Forgets the optimizer's state of whole parameters with every average, taken or not."""

    def take(self, fragment: Fragment, averages: Mapping[str, Tensor]) -> None:
        """Forgets."""
        for piece in fragment.pieces:
            self._optimizer.state.pop(piece.parameter, None)

    def drop(self, fragment: Fragment, alone: bool) -> None:
        """Forgets."""
        self.take(fragment, {})


class AveragedMoments(KeptMoments):
    """Averages the optimizer's moments with the parameters they belong to."""

    def averages(self, fragment: Fragment) -> bool:
        """Always, though there may be none."""
        return True

    def collect(self, fragment: Fragment) -> Values:
        """All moments of the fragment's pieces.

        Raises:
            GradwireError: If no parameter of the optimizer has any.
        """
        values = {_moment(key, piece): _wide(piece.read(moment)) for key, piece, moment in self.moments(fragment)}
        parameters = (each for group in self._optimizer.param_groups for each in group["params"])
        if not values and not any(any(self._of(each)) for each in parameters):
            raise GradwireError(
                f"moments='average' has nothing to average: {type(self._optimizer).__name__} keeps nothing that is "
                "shaped as its parameters, or had no gradients yet on this rank; choose moments='keep', or have every "
                "rank train from the beginning"
            )
        return values

    def take(self, fragment: Fragment, averages: Mapping[str, Tensor]) -> None:
        """Replaces those that were averaged."""
        for key, piece, moment in self.moments(fragment):
            if (average := averages.get(_moment(key, piece))) is not None:
                piece.write(moment, average)


class AveragedBuffers(Beside):
    """Averages the changes of a module's floating-point buffers, with the first fragment of a period.

    What does not change, such as a table of constants or a mask of infinities, stays as it is to the last bit. Where
    the last average is not finite, as an observer's extremes are that has seen nothing yet, the next one is the mean of
    those workers' values that are. Where fragments are averaged alone, the last average may be that of the beginning:
    no more of a buffer goes back to it then than is not finite.

    Args:
        module: Whose buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.last: Values = {}

    def buffers(self) -> dict[str, Tensor]:
        """By name, as the module has them now."""
        return {name: buffer for name, buffer in self._module.named_buffers() if buffer.is_floating_point()}

    def start(self) -> None:
        """Takes the buffers, which are the same on all ranks, for what the last average left."""
        self.last = {name: _wide(buffer) for name, buffer in self.buffers().items()}

    def averages(self, fragment: Fragment) -> bool:
        """With the first one, if there are buffers."""
        return bool(self.last) and not fragment.number

    def collect(self, fragment: Fragment) -> Values:
        """How far each buffer went since its last average.

        Raises:
            ConfigurationError: If there are others now.
        """
        if fragment.number:
            return {}
        buffers = self.buffers()
        for name, buffer in buffers.items():
            if name not in self.last or self.last[name].shape != buffer.shape:
                raise ConfigurationError(
                    f"buffer {name!r} of shape {tuple(buffer.shape)} is new since averaging began, or was of another; "
                    "give buffers= a module whose buffers stay, or attach once all are there"
                )
        values = {_buffer(name): _change(buffer, self.last[name]) for name, buffer in buffers.items()}
        for name, buffer in buffers.items():
            if not finite(self.last[name]):
                wide = _wide(buffer)
                begun = wide.isfinite() & ~self.last[name].isfinite()
                values |= {_begun(name): wide.where(begun, 0), _begun(name, "by"): begun.to(wide.dtype)}
        return values

    def shared(self, fragment: Fragment) -> Values:
        """What each buffer's last average left."""
        return {} if fragment.number else {_buffer(name): last for name, last in self.last.items()}

    def take(self, fragment: Fragment, averages: Mapping[str, Tensor]) -> None:
        """Moves each buffer from its last average by the average change, or to its first that is finite."""
        for name, buffer in self.buffers().items():
            if (change := averages.get(_buffer(name))) is None:
                if not fragment.number:
                    self._mend(name, buffer)
                continue
            last = self.last[name].add_(change)
            if (share := averages.get(_begun(name, "by"))) is not None:
                torch.where(share > 0, averages[_begun(name)] / share, last, out=last)
            buffer.copy_(last)

    def drop(self, fragment: Fragment, alone: bool) -> None:
        """Goes back to the last average."""
        for name, buffer in () if fragment.number else self.buffers().items():
            if alone:
                self._mend(name, buffer)
            else:
                buffer.copy_(self.last[name])

    def _mend(self, name: str, buffer: Tensor) -> None:
        """Takes what is not finite back to the last average."""
        values = _wide(buffer)
        if not finite(values):
            buffer.copy_(torch.where(values.isfinite(), values, self.last[name]))


def averaged(values: Values, device: torch.device) -> Synchronization:
    """Replaces all values, of which there may be none, by their averages over the workers.

    Raises:
        GradwireError: On every rank, if ranks have different values to average.
    """
    text = "\n".join(f"{name} {tuple(value.shape)} {value.dtype}" for name, value in values.items())
    digest = torch.frombuffer(bytearray(hashlib.blake2b(text.encode(), digest_size=16).digest()), dtype=torch.uint8)
    digests = yield AllGather(digest.to(device))
    if not bool((digests == digests[0]).all()):
        raise GradwireError(
            "ranks have different optimizer state or buffers to average: some parameters were never updated on some "
            "ranks; make every parameter take part in every step, or choose moments='keep'"
        )
    if not values:
        return
    answers = yield [AllReduceMean(value) for value in values.values()]
    for value, answer in zip(values.values(), answers, strict=True):
        value.copy_(answer)


def in_step(steps: int, device: torch.device) -> Synchronization:
    """Compares how many local steps all ranks have taken before an average, in 8 bytes.

    They share no collective, for ranks that have taken different numbers may have other things to send with them.

    Raises:
        GradwireError: On every rank, if they have taken different numbers of steps.
    """
    mine = torch.tensor([steps], dtype=torch.int64).view(torch.uint8)
    rows = yield AllGather(mine.to(device), straight=True)
    taken = [int.from_bytes(row.cpu().numpy().tobytes(), sys.byteorder) for row in rows]
    if len(set(taken)) > 1:
        raise GradwireError(
            f"ranks average after different local steps: {', '.join(map(str, taken))}, rank by rank; let every rank "
            "take every step, and every=f give all of them the same periods"
        )


def on_any_rank(mine: Sequence[bool], of_all: list[bool], device: torch.device) -> Synchronization:
    """Adds to a list what holds on some rank, of so many things that each says whether they do; in a byte each."""
    rows = yield AllGather(torch.tensor(mine, dtype=torch.uint8).to(device), straight=True)
    of_all += rows.amax(0).bool().tolist()


def _change(buffer: Tensor, last: Tensor) -> Tensor:
    """How far a buffer went from its last average as its own precision has it: nowhere if that is infinite or NaN."""
    then = _wide(last.to(buffer.dtype))
    return _wide(buffer).sub_(then).masked_fill_(~then.isfinite(), 0)


def _moment(key: str, piece: Piece) -> str:
    return f"moment {key} of {piece.name}"


def _buffer(name: str) -> str:
    return f"buffer {name}"


def _begun(name: str, what: str = "values") -> str:
    return f"first finite {what} of buffer {name}"


def _wide(tensor: Tensor) -> Tensor:
    """A copy in float32, or in float64 if it is that."""
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
