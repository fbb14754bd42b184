"""Patterns of parameter names."""

from __future__ import annotations

from fnmatch import fnmatchcase


def matches(name: str, pattern: str) -> bool:
    """As ``fnmatch`` has it, case-sensitive; and a name is a pattern of itself, whatever brackets are in it."""
    return name == pattern or fnmatchcase(name, pattern)


def takes_all_of(wider: str, pattern: str) -> bool:
    """Whether one pattern matches whatever another does, as far as stars tell: ``"a.*"`` takes all of ``"a.b*"``."""
    return not {"?", "["} & {*wider} and fnmatchcase(pattern, wider)
