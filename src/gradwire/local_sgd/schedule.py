"""When which part of a model is averaged, made valid once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from gradwire.engine.configuration import Configuration
from gradwire.errors import ConfigurationError
from gradwire.memory import MaskedMomentum, Momentum
from gradwire.methods import name_of
from gradwire.plain import Plain, plain

Cut = Literal["contiguous", "strided", "layers"]
Moments = Literal["keep", "reset", "average"]


@dataclass(frozen=True)
class Schedule(Plain):
    """Periods, fragments, and how late and how far an average is taken.

    Attributes:
        every: Local steps of a period, or a function that gives them for the number of the period, from 0.
        fragments: Parts of the model, each averaged once a period, evenly spread over it.
        cut: What a fragment is: consecutive coordinates, every so many-th coordinate, or whole parameters.
        delay: Local steps from sending an average to taking it.
        mix: Weight of the average where it is taken, in (0, 1]; the local value has the rest.
        eager: Whether an average is taken when the fragment's next one is sent, and local steps go on from a guess at
            that one.
        warmup_steps: Steps at first that are each a period, undelayed, unmixed, without an outer optimizer.
        moments: What becomes of the optimizer's moments where parameters are averaged.
    """

    every: int | Callable[[int], int]
    fragments: int
    cut: Cut
    delay: int
    mix: float
    eager: bool
    warmup_steps: int
    moments: Moments

    def __post_init__(self) -> None:
        _check_whole("fragments", self.fragments, 1, "parts of the model")
        _check_whole("delay", self.delay, 0, "local steps")
        _check_whole("warmup_steps", self.warmup_steps, 0, "steps")
        if self.cut not in get_args(Cut):
            raise ConfigurationError(f"cut={self.cut!r} is not known; choose {_listed(Cut)}")
        if self.moments not in get_args(Moments):
            raise ConfigurationError(f"moments={self.moments!r} is not known; choose {_listed(Moments)}")
        if not (isinstance(self.mix, int | float) and 0 < self.mix <= 1):
            raise ConfigurationError(
                f"mix={self.mix!r} is out of range; choose 0 < mix <= 1, 1 to take the average as is"
            )
        if not isinstance(self.eager, bool):
            raise ConfigurationError(f"eager={self.eager!r} is not possible; choose True or False")
        if self.eager and (self.delay or self.mix < 1):
            raise ConfigurationError(
                f"delay={self.delay!r} and mix={self.mix!r} are not possible with eager=True, which takes an average "
                "when the next one is sent, and all of it; leave them out"
            )
        if self.eager and self.moments == "average":
            raise ConfigurationError(
                "moments='average' is not possible with eager=True: averages of moments would come a period late, and "
                "take the place of what local steps made of them meanwhile; choose 'keep' or 'reset'"
            )
        if self.moments == "reset" and self.fragments > 1 and self.cut != "layers":
            raise ConfigurationError(
                f"moments='reset' starts whole parameters anew, but cut={self.cut!r} averages pieces of them; "
                "choose cut='layers'"
            )
        self.length(0)

    def check(self, configuration: Configuration, outer: bool) -> None:
        """Raises ConfigurationError if a method cannot average so what local steps changed.

        Args:
            configuration: The method and its choices.
            outer: Whether an optimizer takes averages for gradients.
        """
        method, carried = configuration.method, configuration.memory
        if isinstance(carried, Momentum | MaskedMomentum):
            raise ConfigurationError(
                f"memory={carried} is momentum of gradients, and local steps have theirs; choose memory='residual' or "
                "'none', and outer=torch.optim.SGD(..., momentum=0.9) for momentum of averages"
            )
        if method.why_no_mean and (self.warmup_steps or not outer):
            raise ConfigurationError(
                f"averages of {name_of(method)} are no means of what local steps changed, because "
                f"{method.why_no_mean}; give an outer optimizer, whose learning rate is then the size of a step, and "
                "leave out warmup_steps, which do without it; or choose another method"
            )
        if self.fragments > 1 and self.cut != "layers" and method.granularities == ("layer",):
            raise ConfigurationError(
                f"{name_of(method)} cannot work on cut={self.cut!r} because {method.why_granularity}; choose "
                "cut='layers'"
            )
        if self.fragments > 1 and configuration.later:
            raise ConfigurationError(
                f"fragments={self.fragments!r} count their averages one by one, so options cannot follow one schedule; "
                "call handle.change when they are to be others"
            )

    def length(self, period: int) -> int:
        """Local steps of a period.

        Raises:
            ConfigurationError: If they are too few.
        """
        length = plain(self.every(period)) if callable(self.every) else self.every
        name = f"every({period})" if callable(self.every) else "every"
        _check_whole(name, length, 1, "local steps")
        if self.fragments > length:
            raise ConfigurationError(
                f"fragments={self.fragments} is out of range; a period of {name}={length} local steps has room for at "
                f"most as many fragments"
            )
        if self.delay >= length:
            raise ConfigurationError(
                f"delay={self.delay} is out of range; choose fewer local steps than the period has, {name}={length}"
            )
        return length

    def due(self, fragment: int, length: int) -> int:
        """The step of a period of ``length`` steps, from 1, after which a fragment is averaged."""
        return max(1, (fragment + 1) * length // self.fragments)

    def describe(self) -> dict[str, str]:
        """What must be the same on all ranks, as text; of a function for ``every``, what it gives at first."""
        return {
            "every": f"{self.length(0)} at first" if callable(self.every) else str(self.every),
            "fragments": str(self.fragments),
            "cut": self.cut,
            "delay": str(self.delay),
            "mix": str(float(self.mix)),
            "eager": str(self.eager),
            "warmup_steps": str(self.warmup_steps),
            "moments": self.moments,
        }


def _check_whole(name: str, value: object, least: int, unit: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name}={value!r} is out of range; choose a whole number of {unit} >= {least}")


def _listed(kind: object) -> str:
    return ", ".join(repr(each) for each in get_args(kind))
