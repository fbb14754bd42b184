"""Things of one kind by name, to which a user's file adds its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from gradwire.errors import ConfigurationError, did_you_mean

Entry = TypeVar("Entry")
Own = TypeVar("Own")
Made = TypeVar("Made")

NUMBER = ":N"
"""What a name ends with that takes a whole number: ``"qsgd:N"`` is asked for as ``"qsgd:4"``."""


class Registry(Generic[Entry]):
    """What is registered under which name, in order.

    Args:
        kind: What messages call one of them.
        otherwise: What may be given in place of a name, for messages.
        beside: Another registry, whose names are known here, too.
        spoken_for: Names that mean something else where one of them is asked for.
    """

    def __init__(
        self, kind: str, otherwise: str = "", beside: Registry[Any] | None = None, spoken_for: Sequence[str] = ()
    ) -> None:
        self._kind = kind
        self._otherwise = otherwise
        self._beside = beside
        self._spoken_for = spoken_for
        self._entries: dict[str, Entry] = {}
        self._besides: list[Registry[Any]] = []
        if beside is not None:
            beside._besides.append(self)

    def register(self, name: str) -> Callable[[Own], Own]:
        """A decorator that enters a class or function: itself, or what makes one, under a name.

        Args:
            name: What it is asked for by; one that ends in ``":N"`` stands for all whole numbers N, and what is entered
                takes the number.

        Raises:
            ConfigurationError: If the name is taken, unless by an earlier run of the same definition, as in a notebook;
                or if nobody could ask for it.
        """
        plain = name.removesuffix(NUMBER) if isinstance(name, str) else ""
        if not plain or plain in self._spoken_for or any(each in ":,=" or each.isspace() for each in plain):
            given = name if isinstance(name, str) else getattr(name, "__qualname__", name)
            raise ConfigurationError(
                f"{self._kind} {given!r} could not be asked for; choose a name, as in register('mine'), without blanks "
                "and any of : , =" + "".join(f", and not {each!r}" for each in self._spoken_for)
            )

        def enter(entry: Own) -> Own:
            taken = dict([*self._all(), *(each for other in self._besides for each in other._all())]).get(name)
            if taken is not None and not _same(taken, entry):
                raise ConfigurationError(f"{self._kind} {name!r} is {_place(taken)} already; choose another name")
            self._entries[name] = entry  # type: ignore[assignment]
            return entry

        return enter

    def names(self) -> tuple[str, ...]:
        """All names."""
        return tuple(name for name, _ in self._all())

    def get(self, name: str) -> Entry:
        """What is registered under a name.

        Raises:
            ConfigurationError: If nothing is.
        """
        return self._find(name)[0]

    def make(self: Registry[Callable[..., Made]], name: str) -> Made:
        """Makes what is registered under a name, of the number after it if there is one.

        Raises:
            ConfigurationError: If nothing is, the number is out of range, or what is registered makes nothing.
        """
        maker, numbers = self._find(name)
        if (made := maker(*numbers)) is None:
            raise ConfigurationError(f"{self._kind} {name!r} is {_place(maker)}, which made None; have it return one")
        return made

    def _all(self) -> list[tuple[str, Entry]]:
        return [*self._entries.items(), *([] if self._beside is None else self._beside._all())]

    def _entry(self, name: str) -> Entry | None:
        """What is entered under exactly this name."""
        beside: Entry | None = None if self._beside is None else self._beside._entry(name)
        return self._entries.get(name) if beside is None else beside

    def _find(self, name: str) -> tuple[Entry, tuple[int, ...]]:
        """The entry, and the number if there is one."""
        plain, _, number = name.partition(":") if isinstance(name, str) else ("", "", "")
        numbered = number.isascii() and number.isdigit()
        if numbered and (found := self._entry(plain + NUMBER)) is not None:
            return found, (int(number),)
        if isinstance(name, str) and not name.endswith(NUMBER) and (found := self._entry(name)) is not None:
            return found, ()
        entries = dict(self._all())
        known = [each.replace(NUMBER, f":{number}") if numbered else each for each in entries]
        meant = did_you_mean(name, [each for each in known if each != name]) if isinstance(name, str) else ""
        raise ConfigurationError(
            f"{self._kind} {name!r} is not known; {meant}all of them: {', '.join(map(repr, entries))}{self._otherwise}"
        )


def _same(one: Any, other: Any) -> bool:
    """Whether one is the other, or another run of its definition."""
    return one is other or (_place(one) == _place(other) and not _place(one).endswith("<lambda>"))


def _place(entry: Any) -> str:
    """Where something was defined."""
    return f"{getattr(entry, '__module__', '')}.{getattr(entry, '__qualname__', repr(entry))}"
