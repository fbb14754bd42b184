"""What comes of holding a law against a method."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.errors import GradwireError


@dataclass(frozen=True)
class Finding:
    """A law, and whether it holds.

    Attributes:
        law: What must be so.
        holds: Whether it is; None where the method does not say so of itself.
        said: What was found where it is not, or why it was not looked for.
    """

    law: str
    holds: bool | None
    said: str


class BrokenError(GradwireError):
    """A law does not hold; says what was found."""


class SilentError(GradwireError):
    """A law was not looked for; says why."""
