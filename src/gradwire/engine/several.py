"""What an attachment by several configurations has in common, be it by pattern or in turns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from gradwire.engine.configuration import Configuration
from gradwire.engine.nodes import Inside, Nodes


@dataclass(frozen=True, eq=False)
class Several:
    """Some configurations in the place of one.

    Attributes:
        rules: All there are; they have ``seed``, ``fuse_bytes``, ``start``, ``inside`` and ``dense`` in common.
    """

    rules: tuple[Configuration, ...]

    @property
    def seed(self) -> int:
        """Where all randomness starts."""
        return self.rules[0].seed

    @property
    def fuse_bytes(self) -> int:
        """Payload to gather before a collective is issued, in bytes."""
        return self.rules[0].fuse_bytes

    @property
    def start(self) -> int:
        """Steps that are averaged densely before the methods begin."""
        return self.rules[0].start

    @property
    def inside(self) -> Inside | None:
        """Which workers average among themselves first, if any do."""
        return self.rules[0].inside

    @property
    def whole(self) -> bool:
        """Whether one of the rules takes the gradient of a whole model at once."""
        return any(rule.whole for rule in self.rules)

    def on(self, nodes: Nodes) -> Self:
        """The same, with the nodes that there are."""
        return replace(self, rules=tuple(rule.on(nodes) for rule in self.rules))
