"""The catalogue: methods by name."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping
from contextlib import suppress
from numbers import Integral, Real
from typing import Any

from gradwire.errors import ConfigurationError, did_you_mean
from gradwire.methods.method import Method
from gradwire.plain import plain
from gradwire.registry import Registry

CHOICES = (
    *("granularity", "route", "memory", "owner", "dense", "seed", "fuse_bytes"),
    *("grad_scaler", "rollback", "learning_rate", "clip_spikes", "audit_every", "verify_every", "start", "inside"),
    "name",
)
"""What goes with every method and is no option of any, for messages."""

methods: Registry[type[Method]] = Registry("method", spoken_for=("auto", "recipe"))
register = methods.register


def names() -> tuple[str, ...]:
    """All names, sorted."""
    return tuple(sorted(methods.names()))


def get(name: str) -> type[Method]:
    """The class behind a name: a frozen dataclass whose fields are the options.

    Raises:
        ConfigurationError: If there is none.
    """
    return methods.get(name)


def name_of(method: Method) -> str:
    """The name a method is registered under; its class's name if it is not."""
    return next((name for name in names() if get(name) is type(method)), type(method).__qualname__)


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Reads a method written as ``name`` or ``name:option=value,option=value``: its name and options.

    A value is a whole number, a number, ``true`` or ``false`` where it reads as one, and text otherwise, as are all of
    an option that is text.

    Raises:
        ConfigurationError: If something is no option with a value, or an option is written twice.

    Example:
        >>> parse("topk:ratio=0.01,values=qsgd:4")
        ('topk', {'ratio': 0.01, 'values': 'qsgd:4'})
    """
    name, _, rest = text.partition(":")
    if name.strip() == "recipe":
        raise ConfigurationError(f"method={text!r} names a recipe; write its line, which gradwire recipes shows")
    options: dict[str, Any] = {}
    texts = _texts(name.strip())
    for part in filter(None, rest.split(",")):
        option, equals, value = (each.strip() for each in part.partition("="))
        if not (option and equals and value):
            raise ConfigurationError(
                f"method={text!r}: {part!r} is not option=value; write it as in 'acpsgd:rank=4' or 'qsgd:bits=4'"
            )
        if option in options:
            raise ConfigurationError(f"method={text!r}: {option!r} is written twice; write it once")
        options[option] = value if option in texts else _value(value)
    return name.strip(), options


def _texts(name: str) -> set[str]:
    """The options of a method that are text, or a name of something: never numbers, though they may read as one."""
    if name not in methods.names() or not dataclasses.is_dataclass(methods.get(name)):
        return set()
    kinds = {each.name: set(_kind(each).split(" | ")) for each in dataclasses.fields(methods.get(name))}  # type: ignore[arg-type]
    return {option for option, parts in kinds.items() if "str" in parts and not parts & _KINDS.keys()}


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def make(method: str | Method, options: dict[str, Any]) -> Method:
    """A method object from a name and options, or the object itself.

    Raises:
        ConfigurationError: If the name or an option is not known, or an option is out of its range.
    """
    if isinstance(method, Method):
        if options:
            raise ConfigurationError(
                f"options {sorted(options)} came with a method object; give them to {type(method).__qualname__}(...)"
            )
        _check_dataclass(type(method))
        _check_kinds(method)
        return method
    if not isinstance(method, str):
        raise ConfigurationError(f"method={method!r} is neither a name nor a method; names: {', '.join(names())}")
    kind = get(method)
    _check_dataclass(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    known = list(fields)
    for option in options:
        if option not in known:
            raise ConfigurationError(
                f"{method!r} has no option {option!r}; {_meant(option, options[option], known)}"
                + (f"its options: {', '.join(known)}" if known else "it has no options")
            )
    absent = (dataclasses.MISSING, dataclasses.MISSING)
    needed = [name for name, each in fields.items() if each.init and (each.default, each.default_factory) == absent]
    if missing := [name for name in needed if name not in options]:
        raise ConfigurationError(f"{method!r} has no default for {', '.join(missing)}; give it, or its class a default")
    given = {option: _fitting(value, _kind(fields[option])) for option, value in options.items()}
    try:
        made = kind(**given)
    except (TypeError, RuntimeError) as error:  # the latter of a tensor of several values
        for option, value in given.items():
            _check_kind(fields[option], value)
        written = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise ConfigurationError(
            f"{method!r} cannot take {written}, of which a type is wrong ({error}); gradwire methods {method} says "
            "what each option is"
        ) from error
    _check_kinds(made)
    return made


_KINDS: Mapping[str, tuple[type, str]] = {
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
}
"""What options of some types are, for messages."""


def _kind(field: dataclasses.Field[Any]) -> str:
    """An option's type as text, whether or not it may be None."""
    return str(getattr(field.type, "__name__", field.type)).removesuffix(" | None")


def _check_kinds(method: Method) -> None:
    """Raises ConfigurationError if an option is of another kind than it says."""
    for field in dataclasses.fields(method):  # type: ignore[arg-type]
        _check_kind(field, getattr(method, field.name))


def _check_kind(field: dataclasses.Field[Any], value: Any) -> None:
    """The same of one; True is no number."""
    kind, words = _KINDS.get(_kind(field), (object, ""))
    fits = isinstance(value, kind) and not (isinstance(value, bool) and kind in (Integral, Real))
    if not fits and value is not field.default:
        raise ConfigurationError(f"{field.name}={value!r} is not possible; choose {words}")


def _check_dataclass(kind: Any) -> None:
    """Raises ConfigurationError unless a method's options are fields, which can reach it, and it has all it must."""
    fits = isinstance(kind, type) and issubclass(kind, Method) and dataclasses.is_dataclass(kind)
    if not fits:
        raise ConfigurationError(
            f"{getattr(kind, '__qualname__', kind)} is no dataclass of a gradwire.methods.Method, whose fields are its "
            "options; write @dataclass(frozen=True, kw_only=True) right above the class"
        )
    for field in dataclasses.fields(kind):  # what is declared may be a field, too: where it is chosen, it is meant
        if field.name in (*CHOICES, "preset", "method") and not hasattr(Method, field.name):
            raise ConfigurationError(
                f"{kind.__qualname__} has an option {field.name!r}, which would never reach it, since {field.name} is "
                "chosen where a method is attached; give the option another name"
            )
    if lacks := sorted(kind.__abstractmethods__):
        raise ConfigurationError(f"{kind.__qualname__} lacks {', '.join(lacks)}; write it, as its base class says")


def _fitting(value: Any, kind: str) -> Any:
    """Numbers as Python has them, also those in a tensor of one and whole ones with a point; all else as it is."""
    value = plain(value)
    with suppress(TypeError, ValueError):
        if kind == "int" and not isinstance(value, bool):
            return int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)
        if kind == "float" and not isinstance(value, int | float | str):
            return float(value)
    return value


def _meant(option: str, value: Any, known: Iterable[str]) -> str:
    """What was probably meant by an option that there is not, or not any more."""
    if option == "bucket":
        return f"did you mean granularity={f'block:{value}' if value else 'layer'!r}? "
    if option in CHOICES:
        return f"{option} is chosen where a method is attached, and has no place here; "
    return did_you_mean(option, [*known, *CHOICES])


def as_published(method: str | Method, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads ``preset="paper"`` among the options: all options, and the publication's choices beside them.

    What is given overrides what was published.

    Raises:
        ConfigurationError: If there is no such preset, or it came with a method object.
    """
    given = {name: value for name, value in options.items() if name != "preset"}
    if "preset" not in options:
        return given, {}
    if options["preset"] != "paper":
        raise ConfigurationError(f"preset={options['preset']!r} is not known; choose 'paper', or leave it out")
    if isinstance(method, Method):
        raise ConfigurationError("preset='paper' came with a method object; give it with a method's name")
    published = get(method).published
    return {**published.options, **given}, published.choices
