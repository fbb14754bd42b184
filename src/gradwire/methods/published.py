"""What a publication has where a method's defaults are others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CHOICES = ("granularity", "memory", "owner", "route")
"""What a publication decides beside the method's options."""


@dataclass(frozen=True)
class Published:
    """What ``preset="paper"`` takes.

    Attributes:
        note: Why defaults differ, and what of the publication is otherwise here or not at all, in Markdown.
        settings: The method's options by name, and :data:`CHOICES`, where they are others than the defaults.
    """

    note: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """The method's own."""
        return {name: value for name, value in self.settings.items() if name not in CHOICES}

    @property
    def choices(self) -> dict[str, Any]:
        """Those beside them."""
        return {name: value for name, value in self.settings.items() if name in CHOICES}
