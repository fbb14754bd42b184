"""A method that is found out in training: some to choose among, and which of them averages now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradwire.engine.choices import Choices
from gradwire.engine.configuration import WRITTEN, Configuration
from gradwire.engine.several import Several
from gradwire.errors import ConfigurationError

AUTO = "auto"

EXACT = ("dense", "bf16")
"""What nobody should be slower than: first of all that are tried."""

AMONG = (
    "qsgd:bits=4",
    "subspace:bits=0.8,granularity=bucket",
    "powersgd:rank=4",
    "deadzone:bits=0.1,granularity=bucket",
    "acpsgd:rank=4",
    "topk:ratio=0.01,route=sharded",
)
"""What else is chosen among if nothing is given, those first that change training least: lines that were measured to
keep the accuracy under some optimizer, with one segment for the model where these have one for each bucket."""


@dataclass(frozen=True, eq=False)
class Automatic(Several):
    """What a :class:`Configuration` is, of a method that is chosen in training.

    Attributes:
        lines: What is chosen among, as it was written, one for each rule; :data:`EXACT` first.
        now: The line that averages are made by now.
        settled: Whether it was chosen; else it is tried.
    """

    lines: tuple[str, ...]
    now: str = EXACT[0]
    settled: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any], choices: Choices) -> Automatic:
        """Checks what is to be chosen among.

        Raises:
            ConfigurationError: If a line cannot be, or a choice was given that is to be made.
        """
        given = {**options, **{name: getattr(choices, name) for name in WRITTEN if getattr(choices, name) is not None}}
        among = given.pop("among", AMONG)
        if given:
            raise ConfigurationError(
                f"{', '.join(f'{name}={value!r}' for name, value in given.items())} came with method='auto', which "
                "chooses it; write it with the methods to choose among, as in among=['topk:ratio=0.01,route=gather']"
            )
        if (
            isinstance(among, str)
            or not isinstance(among, Sequence)
            or not all(isinstance(each, str) for each in among)
        ):
            raise ConfigurationError(
                f"among={among!r} is no list of methods; write it as in among=['topk:ratio=0.01', 'acpsgd:rank=4']"
            )
        lines = {line: Configuration.of(line, {}, choices) for line in dict.fromkeys((*EXACT, *among))}
        for line, configuration in lines.items():
            if configuration.method.bias == "exact" and line not in EXACT:
                raise ConfigurationError(
                    f"among has {line!r}, which compresses nothing; dense and bf16 are always tried"
                )
            if configuration.whole:
                raise ConfigurationError(
                    f"among has {line!r}, which takes the whole gradient at once and cannot take turns with others; "
                    "write granularity=bucket with it, or give it as the method"
                )
        return cls(tuple(lines.values()), tuple(lines))

    @property
    def stages(self) -> tuple[Configuration, ...]:
        """What may hold one after the other."""
        return self.rules

    def at(self, step: int) -> Configuration:
        """What holds in any step, until another line is adopted."""
        return self._by(self.now)

    def rule(self, name: str) -> Configuration:
        """What a parameter of this name goes by now."""
        return self._by(self.now)

    def check_names(self, names: Sequence[str]) -> None:
        """Any parameters will do."""

    def trying(self, line: str) -> Automatic:
        """The same, with averages made by another line."""
        return replace(self, now=line, settled=False)

    def chosen(self, line: str) -> Automatic:
        """The same, settled."""
        return replace(self, now=line, settled=True)

    def as_saved(self, described: Mapping[str, str]) -> Automatic:
        """What a saved run had chosen, if it had, and else the beginning of a choice."""
        line = described.get("chosen", "")
        return self.chosen(line) if line in self.lines else self.trying(EXACT[0])

    def describe(self) -> dict[str, str]:
        """Everything that must be the same on all ranks, as text; of what is only tried nothing is said."""
        line = self.now if self.settled else EXACT[0]
        return {"auto": " ".join(self.lines), "chosen": line if self.settled else "", **self._by(line).describe()}

    def _by(self, line: str) -> Configuration:
        return self.rules[self.lines.index(line)]

    def __str__(self) -> str:
        return f"auto, {'which chose' if self.settled else 'undecided, now'} {self._by(self.now)}"
