"""Local steps that another framework takes: where averages are due, its arrays are copied here and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.attach.elsewhere import Cell, bytes_of, stand_in
from gradwire.attach.foreign import Foreign
from gradwire.attach.given import check_parameters, default_group
from gradwire.attach.roll_call import RollCall
from gradwire.errors import ConfigurationError
from gradwire.local_sgd.attach import attached
from gradwire.local_sgd.handle import Periodic


class Copy:
    """Room for an array's values, as a matrix."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.parameter = nn.Parameter(torch.zeros_like(stand_in(cell), memory_format=torch.contiguous_format))
        self._bytes = self.parameter.detach().view(-1).view(torch.uint8).numpy()

    def fetch(self) -> Copy:
        """Takes the framework's values."""
        values = np.ascontiguousarray(self.cell.read())
        self._dtype = values.dtype
        self._bytes[...] = values.reshape(-1).view(np.uint8)
        return self

    def store(self) -> None:
        """Gives the framework these values."""
        self.cell.write(self._bytes.copy().view(self._dtype).reshape(self.cell.shape))


class Mirror(Optimizer):
    """An optimizer whose steps another framework takes, of copies of what it trains.

    Args:
        parameters: What is averaged, in the model's order.
        moments: What a framework's optimizer keeps of a parameter, given by its place.
        buffers: What is averaged beside it, such as statistics of batch normalisation.

    Raises:
        ConfigurationError: If anything cannot be averaged.
    """

    def __init__(
        self,
        parameters: Sequence[Cell],
        moments: Callable[[int], Mapping[str, Cell]],
        buffers: Sequence[Cell] = (),
    ) -> None:
        self._copies = [Copy(each).fetch() for each in parameters]
        named = [(each.cell.name, each.parameter) for each in self._copies]
        check_parameters(named)
        super().__init__([each for _, each in named], {})
        self.named = named
        self._averaged = [Copy(each).fetch() for each in buffers]
        self.buffers = nn.Module() if buffers else None
        if self.buffers is not None:
            for each in self._averaged:
                self.buffers.register_buffer(each.cell.name.replace(".", "/"), each.parameter.detach())
        places: dict[Tensor, int] = {each.parameter: place for place, each in enumerate(self._copies)}
        self._moments = _Moments(lambda parameter: moments(places[parameter]))
        self.state = self._moments  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        """To be called after the framework's step: what waits for it, such as averages, is done."""

    @contextmanager
    def in_hand(self) -> Iterator[None]:
        """Has the framework's values here, and gives it what has become of them."""
        for each in [*self._copies, *self._averaged]:
            each.fetch()
        yield
        for each in [*self._copies, *self._averaged, *self._moments.fetched()]:
            each.store()


class _Moments:
    """What is asked of an optimizer's state: moments are fetched when they are asked for, which is seldom.

    Args:
        of: Gives a parameter's.
    """

    def __init__(self, of: Callable[[Tensor], Mapping[str, Cell]]) -> None:
        self._of = of
        self._fetched: dict[Tensor, dict[str, Copy]] = {}

    def get(self, parameter: Tensor, default: object) -> dict[str, Tensor]:
        """A parameter's moments."""
        if parameter not in self._fetched:
            self._fetched[parameter] = {key: Copy(cell).fetch() for key, cell in self._of(parameter).items()}
        return {key: copy.parameter for key, copy in self._fetched[parameter].items()}

    def fetched(self) -> list[Copy]:
        """Those that were asked for since the last time."""
        found = [copy for copies in self._fetched.values() for copy in copies.values()]
        self._fetched.clear()
        return found


class Mirrored(Foreign, Periodic):
    """Periodic averaging of what another framework trains; made by :func:`mirrored`.

    Between averages ranks differ, so its state has this rank's variables, too, where the framework keeps them.
    """

    _optimizer: Mirror

    def everything(self) -> list[Cell]:
        """Variables that the framework keeps, and what its optimizer does; none if each step hands them over."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`gradwire.Periodic.state_dict`, and the variables."""
        return {**super().state_dict(), "variables": [bytes_of(cell.read().copy()) for cell in self.everything()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`gradwire.Periodic.load_state_dict`; then the variables are as they were."""
        now = [(cell, cell.read()) for cell in self.everything()]
        saved = state.get("variables", [])
        if [len(each) for each in saved] != [value.nbytes for _, value in now]:
            raise ConfigurationError("the state is of a model or an optimizer with other variables; compile the same")
        super().load_state_dict(state)
        for (cell, value), own in zip(now, saved, strict=True):
            cell.write(own.numpy().copy().view(value.dtype).reshape(value.shape))

    def step(self) -> None:
        """To be called after every local step, on every rank."""
        self._optimizer.step()

    def synchronize(self) -> None:
        """As :meth:`gradwire.Periodic.synchronize`."""
        with self._optimizer.in_hand():
            super().synchronize()

    def _act(self) -> None:
        with self._optimizer.in_hand():
            super()._act()


Kind = TypeVar("Kind", bound=Mirrored)


def mirrored(kind: type[Kind], mirror: Callable[[], Mirror], options: Mapping[str, Any]) -> Kind:
    """A handle that averages what a mirror shows.

    Args:
        kind: Of which class.
        mirror: Makes it; what it raises is raised on all ranks.
        options: Of :func:`gradwire.periodic`; ``moments="reset"`` is refused.

    Raises:
        ConfigurationError: As there.
    """
    with RollCall(default_group(options.get("process_group"))) as roll_call:
        if options.get("moments") == "reset":
            raise ConfigurationError(
                "moments='reset' is torch's: other frameworks count steps and moments of all parameters together; "
                "choose 'keep' or 'average', or start the optimizer's state anew yourself"
            )
        optimizer = mirror()
        roll_call.ready()
    return attached(kind, optimizer, {**options, "parameters": optimizer.named, "buffers": optimizer.buffers})
