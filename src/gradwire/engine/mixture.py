"""A method for each parameter, by patterns of names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from typing import Any

from gradwire.engine.automatic import AUTO, Automatic
from gradwire.engine.choices import Choices
from gradwire.engine.configuration import WRITTEN, Configuration, written_out
from gradwire.engine.recipes import MEASURED_WITH
from gradwire.engine.recipes import others as kin_of
from gradwire.engine.recipes import written_out as recipe
from gradwire.engine.schedule import by_step, value_at
from gradwire.engine.several import Several
from gradwire.errors import ConfigurationError
from gradwire.methods import Method, name_of, parse
from gradwire.patterns import matches, takes_all_of

Methods = str | Method | Mapping[str, str | Method | Mapping[int, str | Method]]
"""A method for all parameters, or one for those whose names match a pattern, the first one that does; that may have
other options from some steps on."""

_COMMON = ("start", "dense", "seed", "fuse_bytes", "inside")
_SHOWN = 5


@dataclass(frozen=True, eq=False)
class Mixture(Several):
    """What a :class:`Configuration` is for all parameters, for those that match a pattern each.

    Attributes:
        patterns: What goes by each rule; the first that a name matches counts.
    """

    patterns: tuple[str, ...]

    @property
    def stages(self) -> tuple[Mixture, ...]:
        """What holds one after the other, if options of a pattern change with time."""
        return tuple(self._by_step.values())

    def at(self, step: int) -> Mixture:
        """What holds in one of the methods' steps."""
        return value_at(self._by_step, step)

    @cached_property
    def _by_step(self) -> dict[int, Mixture]:
        starts = sorted({start for rule in self.rules for start, _ in rule.later})
        if not starts:
            return {0: self}
        return {step: replace(self, rules=tuple(rule.at(step) for rule in self.rules)) for step in (0, *starts)}

    def rule(self, name: str) -> Configuration:
        """What a parameter of this name goes by."""
        if name not in self._known:
            number = self._number(name)
            if number is None:
                raise ConfigurationError(_unmatched([name]))
            self._known[name] = self.rules[number]
        return self._known[name]

    def check_names(self, names: Sequence[str]) -> None:
        """Raises ConfigurationError unless every name has its pattern and every pattern matches a name.

        One that matches names may count for none of them, as a last one for all others may; but not because another
        before it takes whatever it matches.
        """
        missing = [name for name in names if self._number(name) is None]
        if missing:
            raise ConfigurationError(_unmatched(missing))
        for pattern in self.patterns:
            if not any(matches(name, pattern) for name in names):
                raise ConfigurationError(
                    f"no parameter matches the pattern {pattern!r}; leave it out, or write it for names such as "
                    f"{_listed(names)}{'; a bracket stands for itself as [[]' if '[' in pattern else ''}"
                )
        counted = {self._number(name) for name in names}
        for number, pattern in enumerate(self.patterns):
            wider = next((each for each in self.patterns[:number] if takes_all_of(each, pattern)), None)
            if wider is not None and number not in counted:
                raise ConfigurationError(
                    f"the pattern {pattern!r} never counts, because {wider!r} before it matches the same names and the "
                    f"first that matches counts; write it before {wider!r}, or leave it out"
                )

    def as_saved(self, described: Mapping[str, str]) -> Mixture:
        """What a state was saved with, if its rules are kin of these, else this one."""
        others = (replace(self, rules=rules) for rules in product(*((rule, *rule.kin) for rule in self.rules)))
        kin = (each for each in (self, *others) if each.whole == self.whole)
        return next((each for each in kin if each.describe() == described), self)

    def _number(self, name: str) -> int | None:
        return next((number for number, each in enumerate(self.patterns) if matches(name, each)), None)

    @cached_property
    def _known(self) -> dict[str, Configuration]:
        return {}

    def describe(self) -> dict[str, str]:
        """Everything that must be the same on all ranks, as text."""
        described = [rule.describe() for rule in self.rules]
        own = {
            f"{pattern!r} {key}": value
            for pattern, each in zip(self.patterns, described, strict=True)
            for key, value in each.items()
            if key not in _COMMON
        }
        common = {key: value for key, value in described[0].items() if key in _COMMON}
        return {"patterns": ", ".join(map(repr, self.patterns)), **own, **common}

    def __str__(self) -> str:
        return (
            f"{{{', '.join(f'{pattern!r}: {rule}' for pattern, rule in zip(self.patterns, self.rules, strict=True))}}}"
        )


Settled = Configuration | Mixture
"""All choices of one attachment, for all parameters or for patterns of names."""

Configured = Settled | Automatic
"""All choices of one attachment, which may still have to be made."""


def configure(method: Methods, options: dict[str, Any], choices: Choices, workers: int = MEASURED_WITH) -> Configured:
    """Checks all choices against each other, for every pattern if there are patterns.

    Choices that are given go with every method; those that are written with one stand before them. The name of a recipe
    is the line with which so many ``workers`` send least.

    Raises:
        ConfigurationError: As :meth:`Configuration.of`; or if there are no patterns, or options beside them; or if what
            is to be found out cannot be.
    """
    if method == AUTO:
        return Automatic.of(options, choices)
    if not isinstance(method, Mapping):
        return _recipe(method, options, choices, workers)
    if not method or not all(isinstance(pattern, str) for pattern in method):
        raise ConfigurationError(
            f"method={dict(method)!r} is no mapping of patterns; write it as in {{'embed*': 'topk:ratio=0.01', '*': "
            "'qsgd'}"
        )
    if options:
        raise ConfigurationError(
            f"options {sorted(options)} came with a method for each of several patterns; write them with theirs, as in "
            "'topk:ratio=0.01'"
        )
    return Mixture(tuple(_rule(each, choices, workers) for each in method.values()), tuple(method))


def reconfigured(
    configuration: Configured, choices: Choices, method: Methods | None, options: dict[str, Any], workers: int
) -> Settled:
    """Checks other choices in place of some that hold already.

    Args:
        configuration: What holds.
        choices: Those that are to be: of granularity, route, memory and owner what is given anew and None elsewhere.
        method: Another method; None for the same one, whose options and choices stay where none are given.
        options: Of the method, those that are to be others.
        workers: How many there are.

    Raises:
        ConfigurationError: As :func:`configure`; or if there is a method for each of several patterns, and no new ones;
            or if the method is, or is to be, found out in training.
    """
    if fixed := sorted(options.keys() & {field.name for field in fields(Choices)}):
        raise ConfigurationError(
            f"{fixed[0]}={options[fixed[0]]!r} cannot change while training goes on; close this handle and attach anew "
            f"with it, or leave it out"
        )
    given = None if method is None else configure(method, options, choices, workers)
    if isinstance(configuration, Automatic) or isinstance(given, Automatic):
        raise ConfigurationError(
            f"method={AUTO!r} chooses by itself: nothing can be changed to it, or under it; reconsider() has it choose "
            "anew, and a handle that was attached with a method can be changed"
        )
    if given is not None:
        return given
    if isinstance(configuration, Mixture):
        raise ConfigurationError(
            f"there is a method for each of the patterns {', '.join(map(repr, configuration.patterns))}; give all of "
            "them anew, as in change({'embed*': 'topk:ratio=0.001', '*': 'qsgd'})"
        )
    kept = {name: getattr(configuration, name) for name in WRITTEN if getattr(choices, name) is None}
    return Configuration.of(name_of(configuration.method), configuration.options | options, replace(choices, **kept))


def _rule(method: str | Method | Mapping[int, str | Method], choices: Choices, workers: int) -> Configuration:
    if isinstance(method, Mapping):
        methods = by_step("method", method, "{0: 'topk:ratio=0.25', 100: 'topk:ratio=0.01'}")
        (_, first), *further = [(step, _rule(methods[step], choices, workers)) for step in sorted(methods)]
        for step, other in further:
            if type(other.method) is not type(first.method) or replace(other, method=first.method) != first:
                raise ConfigurationError(
                    f"from step {step} on {other} is more than {first} with other options of its own; give one method "
                    "with one granularity, route, memory and owner, and change the rest by handle.change()"
                )
        return replace(first, later=tuple((step, other.method) for step, other in further))
    if not isinstance(method, str):
        return Configuration.of(method, {}, choices)
    given = _given(choices)
    name, written = parse(str(recipe(method, workers, given)))
    return _with_kin(Configuration.of(name, *written_out(written, choices)), kin_of(method, given), {}, choices)


def _recipe(method: str | Method, options: dict[str, Any], choices: Choices, workers: int) -> Configuration:
    """A method, or what a recipe takes with so many workers, and what it takes with others."""
    given = [*options, *_given(choices)]
    taken = Configuration.of(recipe(method, workers, given), options, choices)
    return _with_kin(taken, kin_of(method, given), options, choices)


def _given(choices: Choices) -> list[str]:
    return [name for name in WRITTEN if getattr(choices, name) is not None]


def _with_kin(taken: Configuration, lines: Sequence[str], options: dict[str, Any], choices: Choices) -> Configuration:
    """With those of the lines that can be under the choices."""
    kin = []
    for line in lines:
        with suppress(ConfigurationError):
            name, written = parse(line)
            kin.append(Configuration.of(name, *written_out(options | written, choices)))
    return replace(taken, kin=tuple(kin))


def _unmatched(names: Sequence[str]) -> str:
    return f"no pattern matches {_listed(names)}; add a last one for all others, such as '*': 'dense'"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
